"""The hierarchy of layer grids: which layers each level keeps, and how many evaluations a solve takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from mlotool.core.arguments import is_whole, require
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

    def part(self, number: int, num_parts: int) -> range:
        """Return the points whose layers a process has.

        Args:
            number: of its part.
            num_parts: equal parts that the layers are divided into.

        Raises:
            ConfigError: the chunks cannot be divided equally.
        """
        if num_parts > 1 and (self.num_left or self.num_chunks % num_parts):
            raise ConfigError(
                f"num_layers: found {self.num_layers} with coarsening={self.coarsening} for {num_parts} ranks; "
                f"expected as many chunks on each. Set a multiple of {num_parts * (self.coarsening or 1)} layers."
            )
        size = self.num_layers // num_parts
        return range(number * size, (number + 1) * size)


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
    check_coarsening(coarsening, levels)
    factors: list[int] = []
    if not isinstance(coarsening, int):
        factors = [*coarsening]
        if levels is not None and len(factors) < levels - 1:
            raise ConfigError(
                f"coarsening: found {len(factors)} factors for levels={levels}; expected {levels - 1}, one from each "
                "level to the next. Add factors, or leave levels out."
            )
    else:
        while num_layers // coarsening ** (len(factors) + 1) >= 2:
            factors.append(coarsening)
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
    is_right = bool(factors) and all(is_whole(each, 2) for each in factors)
    expected = "a whole factor of at least 2, or a list of one for each level but the last"
    require(is_right, "coarsening", coarsening, expected, "Write coarsening=4.")
    is_right = levels is None or is_whole(levels, 2)
    require(is_right, "levels", levels, "a whole number of at least 2 (two grids), or null for all")


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
        require(value in known, key, value, f"one of {', '.join(known)}")


@dataclass(frozen=True)
class CriticalPath:
    """Counts of the layer evaluations of one multigrid solve; `critical_path` makes it.

    Args:
        critical: those that one worker takes one after the other, over the start and all cycles.
        total: those of all workers together: how often `step` is called.
        start: critical ones before the first cycle.
        critical_by_level: critical ones of one cycle, by level, finest first.
        total_by_level: all those of one cycle, by level.
        textbook_per_cycle: all those of one cycle where each level relaxes, evaluates the C-points' residual and
            relaxes again, `2 - 1/c` (F) or `3 - 1/c` (FCF) for each of its layers, as the literature counts: at c = 4
            over all levels 2.33 N and 3.67 N. `mgrit` takes fewer: what ends a cycle begins the next one.
        serial: those of a pass through the layers.

    Example:
        >>> path = critical_path(256, 4, None, "F", cycles=1, workers=64)
        >>> path.serial, path.critical, round(path.speedup, 1)
        (256, 29, 8.8)
    """

    critical: int
    total: int
    start: int
    critical_by_level: tuple[int, ...]
    total_by_level: tuple[int, ...]
    textbook_per_cycle: float
    serial: int

    @property
    def speedup(self) -> float:
        """Bound on the speed-up over the serial pass: with free communication and equally fast layers."""
        return self.serial / self.critical


def critical_path(
    num_layers: int,
    coarsening: int | Sequence[int] = 4,
    levels: int | None = None,
    relaxation: str = "FCF",
    cycles: int = 2,
    workers: int = 1,
    *,
    cycle: str = "V",
    nested: bool = False,
) -> CriticalPath:
    """Count the layer evaluations of `mgrit`, or of `mgrit_adjoint`, with so many workers.

    A worker owns whole chunks, so a sweep over K chunks of c layers takes `c ceil(K / workers)` one after the other;
    the layers behind the last C-point go to a worker that has least.
    On level l of N_l layers a cycle takes, in this order: the coarse operator at the injected states (N_l, all at once;
    not on the finest level), a sweep (N_l; two with FCF), and F-relaxation (`N_l (1 - 1/c)`; on the finest level it
    belongs to the sweep that begins the next cycle and gives the residual). The coarsest grid is solved in N_L steps,
    one after the other.

    Args:
        num_layers: N.
        coarsening: c, or one for each level.
        levels: at most so many; None for all.
        relaxation: "F" or "FCF".
        cycles: how many.
        workers: processes, or chunks that a device evaluates at once.
        cycle: "V" or "F".
        nested: whether the start is made by nested iteration, one V-cycle on each grid between the coarsest and the
            finest.

    Raises:
        ConfigError: a setting is out of range.

    Source: Günther et al. 2020, arXiv 1812.04352, section 3.1.1, algorithm 1.

    Example:
        >>> path = critical_path(256, 4, None, "F", cycles=1, workers=64)
        >>> path.critical, path.total, round(path.textbook_per_cycle / 256, 2)
        (29, 740, 2.31)
    """
    check_names(relaxation, cycle)
    grids = make_grids(num_layers, coarsening, levels)
    for key, value, least in (("cycles", cycles, 0), ("workers", workers, 1)):
        require(is_whole(value, least), key, value, f"a whole number of at least {least}")
    if len(grids) == 1:
        return CriticalPath(num_layers, num_layers, num_layers, (0,), (0,), 0.0, num_layers)
    critical = tuple(_of_cycle(grids, relaxation, cycle, workers))
    total = tuple(_of_cycle(grids, relaxation, cycle, 1))
    start, total_start = _chunks(grids[0], workers, 1.0), num_layers
    if nested:
        start += _of_nested_start(grids, relaxation, workers)
        total_start += _of_nested_start(grids, relaxation, 1)
    sums = start + cycles * sum(critical), total_start + cycles * sum(total)
    textbook = sum(_textbook(grid, relaxation) for grid in grids)
    return CriticalPath(*sums, start, critical, total, textbook, num_layers)


def _of_cycle(grids: Sequence[Grid], relaxation: str, cycle: str, workers: int) -> list[int]:
    sweeps = len(relaxation) // 2 + 1
    counts = [sweeps * _chunks(grids[0], workers, 1.0)]
    for level, grid in enumerate(grids[1:], start=1):
        # An F-cycle visits a level once more than the one above; each restriction to it is a new system.
        systems = level if cycle == "F" else 1
        visits = level + 1 if cycle == "F" else 1
        counts.append(systems * ceil(grid.num_layers / workers))
        if grid.coarsening is None:
            counts[-1] += systems * grid.num_layers
        else:
            relaxed = _chunks(grid, workers, 1 - 1 / grid.coarsening)
            counts[-1] += visits * sweeps * _chunks(grid, workers, 1.0) + systems * relaxed
    return counts


def _of_nested_start(grids: Sequence[Grid], relaxation: str, workers: int) -> int:
    """Return the evaluations of one V-cycle on each grid but the finest, and of the coarsest one's solution."""

    def of_solve(level: int) -> int:
        grid = grids[level]
        if grid.coarsening is None:
            return grid.num_layers
        sweeps = len(relaxation) // 2 + 1
        own = sweeps * _chunks(grid, workers, 1.0) + _chunks(grid, workers, 1 - 1 / grid.coarsening)
        return own + ceil(grids[level + 1].num_layers / workers) + of_solve(level + 1)

    return sum(of_solve(level) for level in range(1, len(grids)))


def _chunks(grid: Grid, workers: int, part: float) -> int:
    """Return the evaluations of a worker that visits such a part of each of its chunks."""
    assert grid.coarsening is not None
    whole, rest = divmod(grid.num_chunks, workers)
    # Of a chunk without its last layer the C-relaxation is left out; the last chunk has none if it is short.
    in_chunks = round(grid.coarsening * part)
    return (whole + 1) * in_chunks if rest else whole * in_chunks + grid.num_left


def _textbook(grid: Grid, relaxation: str) -> float:
    if grid.coarsening is None:
        return grid.num_layers
    return grid.num_layers * (len(relaxation) // 2 + 2 - 1 / grid.coarsening)
