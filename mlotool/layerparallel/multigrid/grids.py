"""The hierarchy of layer grids: which layers each level keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlotool.core.arguments import is_whole
from mlotool.core.errors import ConfigError

RELAXATIONS = ("F", "FCF")
CYCLES = ("V", "F")


@dataclass(frozen=True)
class Grid:
    """One level of the hierarchy of grids.

    Its C-points are the multiples of c. Where c does not divide the number of layers, the last chunk has fewer layers
    and no C-point at its end: its points are F-points.

    Args:
        num_layers: of this level; it has one point more.
        stride: layers of the finest grid between two of its points: layer n of this level has the parameters of layer
            `n stride` there, and the step `h stride`.
        coarsening: c, layers of a chunk, from one C-point to the next; None on the coarsest grid, which has no chunks.

    Example:
        >>> grid = Grid(num_layers=18, stride=1, coarsening=4)
        >>> grid.num_chunks, grid.num_left
        (4, 2)
    """

    num_layers: int
    stride: int
    coarsening: int | None

    @property
    def num_chunks(self) -> int:
        """Whole chunks, which relaxation can visit at once."""
        return 1 if self.coarsening is None else self.num_layers // self.coarsening

    @property
    def num_left(self) -> int:
        """Layers behind the last C-point."""
        return 0 if self.coarsening is None else self.num_layers % self.coarsening


def make_grids(num_layers: int, coarsening: int | Sequence[int], levels: int | None) -> tuple[Grid, ...]:
    """Return the grids, finest first.

    A grid of N layers has a coarse one of N // c layers, with one factor c as long as these are at least two. Where
    there are fewer at once, there is one grid, which is solved exactly, one layer after the other.

    Args:
        num_layers: of the finest grid.
        coarsening: one factor for all levels, or one from each level to the next.
        levels: at most so many, the finest included; None adds all.

    Raises:
        ConfigError: a setting is out of range, or one of several factors leaves fewer than two layers.

    Example:
        >>> [grid.num_layers for grid in make_grids(67, coarsening=4, levels=None)]
        [67, 16, 4]
    """
    if not is_whole(num_layers, 1):
        raise ConfigError(f"num_layers: found {num_layers!r}; expected a whole number of at least 1. Correct it.")
    check_coarsening(coarsening, levels)
    if isinstance(coarsening, int):
        factors = _uniform(num_layers, coarsening)
    else:
        factors = [*coarsening]
        if levels is not None and len(factors) < levels - 1:
            raise ConfigError(
                f"coarsening: found {len(factors)} factors for levels={levels}; expected {levels - 1}, one from each "
                "level to the next. Add factors, or leave levels out."
            )
    grids, stride, count = [], 1, num_layers
    for factor in factors[: None if levels is None else levels - 1]:
        if count // factor < 2:
            raise ConfigError(
                f"coarsening: found the factor {factor} for a grid of {count} layers; expected one that leaves at "
                f"least 2 of them. {f'Choose at most {count // 2}' if count > 3 else 'Leave it out'}."
            )
        grids.append(Grid(count, stride, factor))
        count, stride = count // factor, stride * factor
    return (*grids, Grid(count, stride, None))


def check_coarsening(coarsening: int | Sequence[int], levels: int | None) -> None:
    """Refuse factors and numbers of levels that no grid can have.

    Args:
        coarsening: one factor for all levels, or one from each level to the next.
        levels: at most so many; None for all.

    Raises:
        ConfigError: one of them is something else than whole numbers of at least 2.

    Example:
        >>> check_coarsening([4, 2], None)
    """
    factors = coarsening if isinstance(coarsening, Sequence) and not isinstance(coarsening, str) else [coarsening]
    if not factors or not all(is_whole(each, 2) for each in factors):
        raise ConfigError(
            f"coarsening: found {coarsening!r}; expected a whole factor of at least 2, or a list of one for each level "
            "but the last. Write coarsening=4."
        )
    if levels is not None and not is_whole(levels, 2):
        raise ConfigError(
            f"levels: found {levels!r}; expected a whole number of at least 2 (two grids), or null for as many as the "
            "coarsening allows. Correct levels."
        )


def check_names(relaxation: str, cycle: str) -> None:
    """Refuse unknown names of relaxations and cycles.

    Args:
        relaxation: "F" or "FCF".
        cycle: "V" or "F".

    Raises:
        ConfigError: one of them is something else.

    Example:
        >>> check_names("FCF", "W")
        Traceback (most recent call last):
            ...
        mlotool.core.errors.ConfigError: cycle: found 'W'; expected one of V, F. Correct cycle.
    """
    for key, value, known in (("relaxation", relaxation, RELAXATIONS), ("cycle", cycle, CYCLES)):
        if value not in known:
            raise ConfigError(f"{key}: found {value!r}; expected one of {', '.join(known)}. Correct {key}.")


def _uniform(num_layers: int, factor: int) -> list[int]:
    factors: list[int] = []
    while num_layers // factor >= 2:
        factors.append(factor)
        num_layers //= factor
    return factors
