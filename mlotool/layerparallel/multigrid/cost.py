"""How many layer evaluations multigrid takes, and how many of them wait for each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.grids import Grid, check_names, make_grids


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
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{key}: found {value!r}; expected a whole number of at least {least}. Correct {key}.")
    if len(grids) == 1:
        return CriticalPath(num_layers, num_layers, num_layers, (0,), (0,), 0.0, num_layers)
    critical = tuple(_of_cycle(grids, relaxation, cycle, workers))
    total = tuple(_of_cycle(grids, relaxation, cycle, 1))
    start = _chunks(grids[0], workers, 1.0) + (_of_nested_start(grids, relaxation, workers) if nested else 0)
    total_start = num_layers + (_of_nested_start(grids, relaxation, 1) if nested else 0)
    return CriticalPath(
        start + cycles * sum(critical),
        total_start + cycles * sum(total),
        start,
        critical,
        total,
        sum(_textbook(grid, relaxation) for grid in grids),
        num_layers,
    )


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
