"""The hierarchy of layer grids: which layers each level keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlotool.core.errors import ConfigError

RELAXATIONS = ("F", "FCF")
CYCLES = ("V", "F")


@dataclass(frozen=True)
class Grid:
    """One level of the hierarchy of grids.

    Args:
        num_layers: of this level; it has one point more.
        stride: layers of the finest grid between two of its points: layer n of this level has the parameters of layer
            `n stride` there, and the step `h stride`.
        coarsening: layers of a chunk, from one C-point to the next; None on the coarsest grid, which has no chunks.

    Example:
        >>> Grid(num_layers=16, stride=1, coarsening=4).num_chunks
        4
    """

    num_layers: int
    stride: int
    coarsening: int | None

    @property
    def num_chunks(self) -> int:
        """Chunks that relaxation can visit at once."""
        return 1 if self.coarsening is None else self.num_layers // self.coarsening


def make_grids(num_layers: int, coarsening: int | Sequence[int], levels: int | None) -> tuple[Grid, ...]:
    """Return the grids, finest first.

    With one factor c, a level is added while c divides the last one's number of layers and leaves at least two.

    Args:
        num_layers: of the finest grid.
        coarsening: one factor for all levels, or one from each level to the next.
        levels: at most so many, the finest included; None adds all.

    Raises:
        ConfigError: a factor does not divide, or there would be fewer than two levels.

    Example:
        >>> [grid.num_layers for grid in make_grids(64, coarsening=4, levels=None)]
        [64, 16, 4]
    """
    if not _is_whole(num_layers, 1):
        raise ConfigError(f"num_layers: found {num_layers!r}; expected a whole number of at least 1. Correct it.")
    if levels is not None and not _is_whole(levels, 2):
        raise ConfigError(
            f"levels: found {levels!r}; expected a whole number of at least 2 (two grids), or null for as many as the "
            "coarsening allows. Correct levels."
        )
    is_uniform = isinstance(coarsening, int)
    factors = _uniform(num_layers, coarsening, levels) if isinstance(coarsening, int) else [*coarsening]
    if levels is not None and not is_uniform and len(factors) < levels - 1:
        raise ConfigError(
            f"coarsening: found {len(factors)} factors for levels={levels}; expected {levels - 1}, one from each "
            "level to the next. Add factors, or leave levels out."
        )
    grids, stride, count = [], 1, num_layers
    for factor in factors[: None if levels is None else levels - 1]:
        _check_factor(count, factor)
        grids.append(Grid(count, stride, factor))
        count, stride = count // factor, stride * factor
    return (*grids, Grid(count, stride, None))


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


def _uniform(num_layers: int, factor: int, levels: int | None) -> list[int]:
    # The first level is not optional: that it does not fit is an error, which the caller raises.
    factors, count = [factor], num_layers
    while _is_whole(factor, 2) and (levels is None or len(factors) < levels - 1):
        count //= factor
        if count % factor or count // factor < 2:
            break
        factors.append(factor)
    return factors


def _check_factor(num_layers: int, factor: int) -> None:
    if not _is_whole(factor, 2) or num_layers % factor or num_layers // factor < 2:
        fits = [each for each in range(2, num_layers // 2 + 1) if num_layers % each == 0]
        advice = f"one of {', '.join(map(str, fits[:8]))}" if fits else "more layers: none fits"
        raise ConfigError(
            f"coarsening: found {factor!r} for a grid of {num_layers} layers; expected a whole factor of at least 2 "
            f"that divides the layers and leaves at least 2 of them. Choose {advice}."
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
