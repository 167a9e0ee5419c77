"""The hierarchy of layer grids: which layers each level keeps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from mlotool.core.arguments import is_whole, require


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
        >>> grid.num_chunks, grid.part(0, 1)
        (4, range(0, 18))
    """

    num_layers: int
    stride: int
    coarsening: int | None

    @property
    def num_chunks(self) -> int:
        """Whole chunks, which relaxation can visit at once."""
        return 1 if self.coarsening is None else self.num_layers // self.coarsening

    def part(self, number: int, num_parts: int) -> range:
        """Return the points whose layers a process has.

        Args:
            number: of its part.
            num_parts: equal parts that the layers are divided into.

        Raises:
            ConfigError: the chunks cannot be divided equally.
        """
        multiple = num_parts * (self.coarsening or 1)
        is_right = num_parts == 1 or self.num_layers % multiple == 0
        require(is_right, "num_layers", self.num_layers, f"a multiple of {multiple}, for {num_parts} ranks")
        size = self.num_layers // num_parts
        return range(number * size, (number + 1) * size)

    def layers(self, points: range) -> range:
        """Return the layers of the finest grid whose parameters the layers at these points have.

        Example:
            >>> Grid(num_layers=4, stride=4, coarsening=2).layers(range(1, 4, 2))
            range(4, 16, 8)
        """
        return range(points.start * self.stride, points.stop * self.stride, points.step * self.stride)


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
    require(is_whole(num_layers, 1), "num_layers", num_layers, "a whole number of at least 1")
    require(levels is None or is_whole(levels, 2), "levels", levels, "a whole number of at least 2, or null for all")
    is_list = isinstance(coarsening, Sequence) and not isinstance(coarsening, str)
    factors: Sequence[int] = coarsening if is_list else [coarsening]  # type: ignore[assignment, list-item]
    is_right = bool(factors) and all(is_whole(factor, 2) for factor in factors)
    expected = "a whole factor of at least 2, or a list of one for each level but the last"
    require(is_right, "coarsening", coarsening, expected, "Write coarsening=4.")
    grids: list[Grid] = []
    stride, count = 1, num_layers
    per_level: Iterable[int] = factors if is_list else repeat(factors[0])
    for factor in per_level:
        is_last = count // factor < 2
        if len(grids) + 1 == levels or (is_last and not is_list):
            break
        require(not is_last, "coarsening", coarsening, f"factors that leave at least 2 of {count} layers")
        grids.append(Grid(count, stride, factor))
        count, stride = count // factor, stride * factor
    return (*grids, Grid(count, stride, None))
