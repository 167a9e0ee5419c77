"""MGRIT with full approximation storage: for any two-term recursion, and for the states and adjoints of a network.

The grids say which layers each level keeps.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from math import ceil
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le, MinLen
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Finite, NonNegative, checked
from mlotool.layerparallel.exchange import Exchange
from mlotool.layerparallel.multigrid.layers import BatchedStep, Evaluate, Linearised, Step, batched

# values: (N_l + 1, b, ...), one point of the level after the other; source: the same; ahead: (num_chunks, b, ...)
# A recursion that runs from the last layer to the first is mirrored: its point m lies at N_l - m, so that points which
# are taken together are in the order of their layers, whichever way it runs.


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
        ConfigError: one of several factors leaves fewer than two layers.

    Example:
        >>> [grid.num_layers for grid in make_grids(67, coarsening=4, levels=None)]
        [67, 16, 4]
    """
    grids: list[Grid] = []
    stride, count = 1, num_layers
    per_level: Iterable[int] = repeat(coarsening) if isinstance(coarsening, int) else coarsening
    for factor in per_level:
        is_last = count // factor < 2
        if len(grids) + 1 == levels or (is_last and isinstance(coarsening, int)):
            break
        require(not is_last, "coarsening", coarsening, f"factors that leave at least 2 of {count} layers")
        grids.append(Grid(count, stride, factor))
        count, stride = count // factor, stride * factor
    return (*grids, Grid(count, stride, None))


# `advance(grid, values, points)`: what follows the values (k, b, ...) at these k points of a grid, source aside; of a
# mirrored recursion the values are in the opposite order of the points.
Advance = Callable[[Grid, Tensor, range], Tensor]


Relaxation = Literal["F", "FCF"]
CycleKind = Literal["V", "F"]
Cycles = Annotated[int, Ge(0), Le(1_000_000)]
Coarsening = Annotated[int, Ge(2)] | Annotated[Sequence[Annotated[int, Ge(2)]], MinLen(1)]


@checked
@dataclass(frozen=True)
class Method:
    """How the layers are coarsened, and how often.

    Args:
        coarsening: c, one factor for all levels, or one from each level to the next.
        levels: at most so many, the finest included (2: two grids); None for all.
        relaxation: "F" or "FCF", on all levels.
        cycles: at most so many.
        tolerance: ends at a residual of at most this; None takes all cycles.
        relative_tolerance: ends at a residual of at most this times that before the first cycle.
        cycle: "V", or "F", which visits coarse grids more often.
        nested: start from the coarsest grid's solution, improved by one V-cycle on each grid between it and the finest.

    Raises:
        ConfigError: a setting is out of range.

    Example:
        >>> Method(relaxation="F", cycles=3)
        Method(coarsening=4, levels=None, relaxation='F', cycles=3, tolerance=None, relative_tolerance=None, \
cycle='V', nested=False)
    """

    coarsening: Coarsening = 4
    levels: Annotated[int, Ge(2)] | None = None
    relaxation: Relaxation = "FCF"
    cycles: Cycles = 10
    tolerance: NonNegative | None = None
    relative_tolerance: NonNegative | None = None
    cycle: CycleKind = "V"
    nested: bool = False

    def grids(self, num_layers: int) -> tuple[Grid, ...]:
        """Return the grids of so many layers, finest first."""
        return make_grids(num_layers, self.coarsening, self.levels)

    def path(self, num_layers: int, workers: int) -> "CriticalPath":
        """Return how many evaluations a solve of so many layers takes with so many workers (see `critical_path`)."""
        grids, cycles = self.grids(num_layers), self.cycles
        counts = [_counts(replace(self, cycles=number), num_layers, workers) for number in (0, 1)]
        start, start_of_all = (sum(by_stride.values()) for by_stride in counts[0])
        # One cycle is what a solve with one takes beside the start.
        by_level, all_by_level = (
            tuple(with_one[grid.stride] - without[grid.stride] for grid in grids)
            for without, with_one in zip(*counts, strict=True)
        )
        sums = start + cycles * sum(by_level), start_of_all + cycles * sum(all_by_level)
        sweeps = 1 if self.relaxation == "F" else 2
        textbook = sum(grid.num_layers * (sweeps + 1 - 1 / grid.coarsening) for grid in grids if grid.coarsening)
        textbook += grids[-1].num_layers if len(grids) > 1 else 0
        return CriticalPath(*sums, start, by_level, all_by_level, textbook, num_layers)


def solve(
    advance: Advance,
    origin: Tensor,
    values: Tensor,
    source: Tensor | None,
    method: Method,
    exchange: Exchange | None = None,
    is_nested: bool = False,
    is_mirrored: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return v with `v^0 = origin` and `v^{n+1} = Phi(v^n) + source^{n+1}`, as far as the cycles get.

    Args:
        advance: Phi, on each grid.
        origin: (b, ...), the first value.
        values: the start (N + 1, b, ...), changed in place; of several ranks, that of this rank's part.
        source: the right-hand side G (N + 1, b, ...), of which the first point is not looked at; None is zero, which
            several ranks need.
        method: how the layers are coarsened, and how often.
        exchange: with the ranks that have the other layers; None: this process has all of them.
        is_nested: whether it starts by nested iteration, in place of `values`.
        is_mirrored: whether v^n lies at N - n, in the start, the right-hand side and the result.

    Returns:
        The values (N + 1, b, ...), and the residuals' Frobenius norms (cycles + 1,): after the first F-relaxation and
        after each cycle.

    Source: Günther et al. 2020, arXiv 1812.04352, section 3.1.1, equations 3.21 to 3.30, algorithm 1.

    Example:
        A coarse step that equals the fine steps which it replaces solves the system in one cycle:

        >>> values, method = torch.ones(17, 1, dtype=torch.float64), Method(relaxation="F", cycles=1)
        >>> decay = lambda grid, v, points: v * 0.9**grid.stride
        >>> values, residuals = solve(decay, values[0].clone(), values, None, method)
        >>> round(values[-1].item(), 4), round(0.9**16, 4), residuals[1].item() < 1e-12
        (0.1853, 0.1853, True)
    """
    exchange = exchange or Exchange()
    solver = _Solve(advance, origin, (len(values) - 1) * exchange.num_parts, method, exchange, is_mirrored)
    return solver.run(values, source, is_nested=is_nested)


class _Solve:
    """One solve: the recursion over the grids. Of the finest one it has a part, of the others all."""

    def __init__(
        self, advance: Advance, origin: Tensor, num_layers: int, method: Method, exchange: Exchange, is_mirrored: bool
    ) -> None:
        self.advance, self.origin, self.method = advance, origin, method
        self.exchange, self.is_mirrored = exchange, is_mirrored
        self.grids = method.grids(num_layers)
        # The points at hand, by level: a part of the finest grid, and all of the others.
        coarse = (range(grid.num_layers) for grid in self.grids[1:])
        self.points = self.grids[0].part(exchange.part, exchange.num_parts), *coarse

    @torch.no_grad()
    def run(self, values: Tensor, source: Tensor | None, *, is_nested: bool) -> tuple[Tensor, Tensor]:
        """Iterate to the tolerance."""
        if self.grids[0].coarsening is None:
            self._substitute(0, values, source)
            return values, torch.zeros(1, dtype=values.dtype, device=values.device)
        if is_nested:
            self._start_nested(values, source)
        else:
            self._pass_on(values)
        ahead = self._sweep(0, values, source)
        norms = [self._norm(values, source, ahead)]
        target = self._target(norms[0])
        for _ in range(self.method.cycles):
            # Asked only where there is a tolerance: on a GPU the answer waits for all that was launched.
            if target is not None and float(norms[-1]) <= target:
                break
            self._cycle(0, values, source, ahead, self.method.cycle)
            ahead = self._sweep(0, values, source)
            norms.append(self._norm(values, source, ahead))
        return values, torch.stack(norms)

    def _cycle(self, level: int, values: Tensor, source: Tensor | None, ahead: Tensor, kind: str) -> None:
        """Relax, and correct the C-points; the F-points are the caller's.

        Args:
            level: its number.
            values: F-relaxed.
            source: its right-hand side.
            ahead: what `_sweep` returned for these values.
            kind: "V" or "F".
        """
        factor, below, own = self._factor(level), self.grids[level + 1], self._chunks(level)
        if self.method.relaxation == "FCF":
            # C-relaxation needs no layer: the sweep before it has evaluated the last layer of each chunk.
            self._c_points(level, values).copy_(self._right(level, ahead, source))
            if level == 0:
                self._pass_on(values)
            ahead = self._sweep(level, values, source)
        coarse = self._at(values, 0, factor, len(own) + 1)
        # A_c(U_c) + R_c at the C-points, where U_c and the injected U cancel: the fine step minus the coarse one.
        right = self._right(level, ahead, source)
        coarse_source = right - self.advance(below, self._at(coarse, 0, 1, len(own)), own)
        coarse = self._whole(level, self._at(coarse, 1, 1, len(own)))
        self._solve(level + 1, coarse, self._whole(level, coarse_source), kind)
        self._at(values, 0, factor, len(own) + 1).copy_(self._at(coarse, own.start, 1, len(own) + 1))

    def _solve(self, level: int, values: Tensor, source: Tensor | None, kind: str) -> None:
        """Solve a coarse system: exactly on the coarsest grid, else by one cycle, with "F" by an F- and a V-cycle."""
        if self.grids[level].coarsening is None:
            self._substitute(level, values, source)
            return
        for of_cycle in ("F", "V") if kind == "F" else ("V",):
            self._cycle(level, values, source, self._sweep(level, values, source), of_cycle)
        self._relax(level, values, source)

    def _start_nested(self, values: Tensor, source: Tensor | None) -> None:
        """Solve the coarsest grid, and start from there on each finer one, with one V-cycle on all but the finest."""
        coarse = None
        for level in range(len(self.grids) - 1, 0, -1):
            grid = self.grids[level]
            current = self.origin.expand(grid.num_layers + 1, *self.origin.shape).clone()
            if coarse is not None:
                self._at(current, 0, self._factor(level), len(coarse)).copy_(coarse)
            of_level = None if source is None else self._at(source, 0, grid.stride, grid.num_layers + 1)
            self._solve(level, current, of_level, "V")
            coarse = current
        assert coarse is not None
        own = self._chunks(0)
        self._at(values, 0, self._factor(0), len(own) + 1).copy_(self._at(coarse, own.start, 1, len(own) + 1))

    def _sweep(self, level: int, values: Tensor, source: Tensor | None) -> Tensor:
        """F-relax, and return what the last layer of each chunk makes of it, source aside: C-points are left alone."""
        self._relax(level, values, source)
        return self._advanced(level, values, self._factor(level) - 1)

    def _relax(self, level: int, values: Tensor, source: Tensor | None) -> None:
        factor = self._factor(level)
        for offset in range(factor - 1):
            moved = self._advanced(level, values, offset)
            if source is not None:
                moved = moved + self._at(source, offset + 1, factor, len(moved))
            self._at(values, offset + 1, factor, len(moved)).copy_(moved)

    def _advanced(self, level: int, values: Tensor, offset: int) -> Tensor:
        """Advance the point of that offset in all chunks at once, and behind the last C-point if there is one."""
        factor = self._factor(level)
        points = self.points[level][offset::factor]
        return self.advance(self.grids[level], self._at(values, offset, factor, len(points)), points)

    def _substitute(self, level: int, values: Tensor, source: Tensor | None) -> None:
        for point in range(self.grids[level].num_layers):
            moved = self.advance(self.grids[level], self._at(values, point, 1, 1), range(point, point + 1))
            if source is not None:
                moved = moved + self._at(source, point + 1, 1, 1)
            self._at(values, point + 1, 1, 1).copy_(moved)

    def _norm(self, values: Tensor, source: Tensor | None, ahead: Tensor) -> Tensor:
        # After F-relaxation the residual of the F-points is zero, so that of the C-points is all of it.
        residual = self._right(0, ahead, source) - self._c_points(0, values)
        return self.exchange.norm(torch.linalg.vector_norm(residual))

    def _pass_on(self, values: Tensor) -> None:
        """Put the last point of the part before into the first place."""
        received = self.exchange.pass_on(self._at(values, len(values) - 1, 1, 1)[0])
        if received is not None:
            self._at(values, 0, 1, 1).copy_(received)

    def _whole(self, level: int, own: Tensor) -> Tensor:
        """Return a coarse grid's points from those of this rank's chunks, with the origin before them."""
        points = self.exchange.gather(own) if level == 0 else own
        return torch.cat([points, self.origin[None]] if self.is_mirrored else [self.origin[None], points])

    def _factor(self, level: int) -> int:
        factor = self.grids[level].coarsening
        assert factor is not None
        return factor

    def _chunks(self, level: int) -> range:
        """Return the numbers of the chunks that are at hand on a level: points of the one below."""
        points, factor = self.points[level], self._factor(level)
        return range(points.start // factor, points.stop // factor)

    def _c_points(self, level: int, values: Tensor) -> Tensor:
        """Return the C-points but the first one."""
        return self._at(values, self._factor(level), self._factor(level), len(self._chunks(level)))

    def _right(self, level: int, ahead: Tensor, source: Tensor | None) -> Tensor:
        """Return what the C-points would be: the layers before them, and the right-hand side."""
        return ahead if source is None else ahead + self._c_points(level, source)

    def _at(self, values: Tensor, first: int, step: int, count: int) -> Tensor:
        """Return a view of so many points, from `first` on."""
        last = first + (count - 1) * step
        if self.is_mirrored:
            first, last = len(values) - 1 - last, len(values) - 1 - first
        return values[first : last + 1 : step]

    def _target(self, first: Tensor) -> float | None:
        targets = [] if self.method.tolerance is None else [self.method.tolerance]
        if self.method.relative_tolerance is not None:
            targets.append(self.method.relative_tolerance * float(first))
        return max(targets, default=None)


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


@checked
def critical_path(
    num_layers: Count,
    coarsening: Coarsening = 4,
    levels: int | None = None,
    relaxation: Relaxation = "FCF",
    cycles: int = 2,
    workers: Count = 1,
    *,
    cycle: CycleKind = "V",
    nested: bool = False,
) -> CriticalPath:
    """Count the layer evaluations of `mgrit`, or of `mgrit_adjoint`, with so many workers, by a solve of no layers.

    Layers that a solve evaluates in one call are divided among the workers: k of them take `ceil(k / workers)` one
    after the other.

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
    return Method(coarsening, levels, relaxation, cycles, cycle=cycle, nested=nested).path(num_layers, workers)


def _counts(method: Method, num_layers: int, workers: int) -> tuple[Counter[int], Counter[int]]:
    """Return the evaluations of one worker, and those of all, by the stride of the grid."""
    of_one: Counter[int] = Counter()
    of_all: Counter[int] = Counter()

    def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
        of_one[grid.stride] += ceil(len(points) / workers)
        of_all[grid.stride] += len(points)
        return values

    values = torch.zeros(num_layers + 1)
    solve(advance, values[0].clone(), values, None, method, is_nested=method.nested)
    return of_one, of_all


@checked
def mgrit(
    step: Step | BatchedStep,
    u0: Tensor,
    num_layers: Count,
    h: Finite,
    *,
    initial: Tensor | None = None,
    group: Any = None,
    **method: Any,
) -> tuple[Tensor, list[float]]:
    """Solve `u^{n+1} = Phi(u^n, theta^n)` for all layers at once by multigrid, with full approximation storage.

    The system is `A(U) = G` with `A(U)_0 = u^0`, `A(U)_n = u^n - Phi(u^{n-1})` and `G = (u0, 0, ..., 0)`; its residual
    is `R = G - A(U)`. On a grid of N layers the C-points are the multiples of c, all others are F-points.

    1. F-relaxation: `u^n = Phi(u^{n-1}) + G_n` at the F-points, one after the other within a chunk, all chunks at
       once. "FCF" goes on with the same at all C-points (each from the F-point before it), and F-relaxation again.
    2. The coarse system: `A_c(V) = A_c(U_c) + R_c`, where U_c and R_c are the values and residuals at the C-points.
       Its right-hand side is nonzero at all points: `G_c^k = Phi(u^{kc-1}) + G^{kc} - Phi_c(u^{(k-1)c})` for k > 0 (the
       tau correction). Phi_c is the step with `c h` and the parameters of layer nc; on level l, of layer `n c^l`.
       It is solved by one cycle that begins at U_c ("V"), by an F-cycle and then a V-cycle ("F"), or, on the coarsest
       grid, exactly, one layer after the other.
    3. `u^{kc} = u^{kc} + V^k - U_c^k`, and F-relaxation.

    All points start at u0. One F-relaxation goes before the first cycle, and the residual after it is the first one of
    the history; the others are those at the END of each cycle. The norm is Frobenius', over all points and the whole
    batch: after F-relaxation the F-points contribute nothing, so that of the C-points is all of it. No level is
    skipped on the first way down, and all levels relax alike. A grid of N layers has a coarse one of N // c, as long as
    that is at least two; layers behind the last C-point belong to a last, shorter chunk, which ends in an F-point.
    After N/c cycles with F and N/(2c) with FCF the result is the serial one; F on two grids is
    Parareal.

    Nothing is recorded for autograd: `MultigridResidual` is the module that has a backward.

    Args:
        step: `step(u, n, h)`, the state (b, ...) after layer n of the FINEST grid with step h; or a `BatchedStep`.
        u0: (b, ...), the first state.
        num_layers: N.
        h: step of the finest grid.
        initial: (N + 1, b, ...), the start of all points, such as the states of the last training step.
        group: a torch.distributed group of P ranks, each of which relaxes N/P layers, one part after the other in the
            order of the ranks: what is `(N + 1, b, ...)` here is then `(N/P + 1, b, ...)`, the rank's own points and
            the last one before them. Ranks exchange C-points with their neighbors, and gather the C-points and their
            right-hand sides; all solve the coarser grids. u0 is the first rank's.
        method: the fields of `Method`: coarsening=4, levels=None, relaxation="FCF", cycles=10, tolerance=None,
            relative_tolerance=None, cycle="V", nested=False.

    Returns:
        The states (N + 1, b, ...), and the residuals: before the first cycle, then after each.

    Raises:
        ConfigError: a setting is out of range, chunks cannot be divided over the ranks, or a layer changes the shape.

    Cost: `critical_path` counts the layers. Memory: N + 1 states and those of the coarser grids, N/(c - 1).

    Source: Günther et al. 2020, Layer-parallel training of deep residual neural networks, arXiv 1812.04352, section
    3.1.1, equations 3.21 to 3.30, algorithm 1.

    Example:
        >>> import torch
        >>> step, u0 = (lambda u, n, h: u - h * u), torch.ones(1, 1)
        >>> states, residuals = mgrit(step, u0, 16, 0.1, levels=2, relaxation="F", cycles=4)
        >>> round(states[-1].item(), 4), round(0.9**16, 4), len(residuals), residuals[-1] < 1e-6
        (0.1853, 0.1853, 5, True)
    """
    is_real = u0.is_floating_point() or u0.is_complex()
    require(is_real, "u0", u0, "a tensor of floating-point numbers", "Make it one: u0.float().")
    layers = Propagation(batched(step), num_layers, float(h), Method(**method), Exchange(group))
    states, residuals = layers.states(u0, initial)
    return states, residuals.tolist()


@checked
def mgrit_adjoint(
    step: Step | BatchedStep,
    states: Tensor,
    cotangent: Tensor,
    num_layers: Count,
    h: Finite,
    *,
    initial: Tensor | None = None,
    group: Any = None,
    **method: Any,
) -> tuple[Tensor, list[float]]:
    """Solve `ubar^n = (dPhi/du (u^n, theta^n))^T ubar^{n+1}` from `ubar^N` for all layers at once by multigrid.

    The same cycles as `mgrit` on the mirrored points `w^m = ubar^{N-m}`: all points start at the cotangent, chunks run
    from layer N down, and F-relaxation goes first. The C-points are those with m, so also n = N - m, a multiple of c.
    A coarse layer is the transposed step with `c h` and the parameters of layer nc at the FINE state u^{nc}.

    Args:
        step: as for `mgrit`.
        states: (N + 1, b, ...), at which the layers are linearized; the last one is not looked at.
        cotangent: ubar^N (b, ...), the loss's gradient with respect to the last state.
        num_layers: N.
        h: step of the finest grid.
        initial: (N + 1, b, ...), the start of all adjoints, by n.
        group: as for `mgrit`; states, adjoints and `initial` are those of the rank's points, the cotangent the last
            rank's.
        method: as for `mgrit`.

    Returns:
        The adjoints (N + 1, b, ...) by n, and the residuals.

    Raises:
        ConfigError: as for `mgrit`; or there are not N + 1 states.

    Cost: as for `mgrit`, with a layer's transposed product for the layer. Each layer is traced once on each grid, and
    the traces are kept for all cycles.

    Source: Günther et al. 2020, arXiv 1812.04352, section 3.2, equations 3.31 to 3.33.

    Example:
        >>> import torch
        >>> states = torch.ones(17, 1, 1)
        >>> step, cotangent = (lambda u, n, h: u - h * u), torch.ones(1, 1)
        >>> adjoints, _ = mgrit_adjoint(step, states, cotangent, 16, 0.1, levels=2, relaxation="F", cycles=4)
        >>> round(adjoints[0].item(), 4), adjoints[16].item()
        (0.1853, 1.0)
    """
    layers = Propagation(batched(step), num_layers, float(h), Method(**method), Exchange(group, is_mirrored=True))
    adjoints, residuals = layers.adjoints(states, None, cotangent, initial)
    return adjoints, residuals.tolist()


@dataclass(frozen=True)
class Propagation:
    """The solves of some layers: of their states, and at these states of adjoints and tangents.

    Args:
        evaluate: the layers, many of them in one call.
        num_layers: N, of all P ranks.
        h: step of the finest grid.
        method: how the layers are coarsened, and how often.
        exchange: with the ranks that have the other layers; of adjoints from the last rank to the first.

    Raises:
        ConfigError: from each solve: chunks cannot be divided over the ranks, or a start has another shape.

    Example:
        >>> import torch
        >>> layers = Propagation(batched(lambda u, n, h: u - h * u), 16, 0.1, Method(relaxation="F", cycles=4))
        >>> states, residuals = layers.states(torch.ones(2, 1))
        >>> states.shape, residuals.shape, layers.adjoints(states, None, torch.ones(2, 1))[0].shape
        (torch.Size([17, 2, 1]), torch.Size([5]), torch.Size([17, 2, 1]))
    """

    evaluate: Evaluate
    num_layers: int
    h: float
    method: Method
    exchange: Exchange = field(default_factory=Exchange)

    @property
    def own(self) -> range:
        """The numbers of this process's layers."""
        return self.method.grids(self.num_layers)[0].part(self.exchange.part, self.exchange.num_parts)

    def states(self, u0: Tensor, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states (N/P + 1, b, ...) of this process's points, and the residuals' norms (cycles + 1,).

        Args:
            u0: (b, ...), the first state; on several ranks that of the first one counts.
            initial: (N/P + 1, b, ...), the start of the points; None starts at u0.
        """

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            return self.evaluate(values, grid.layers(points), self.h * grid.stride)

        return self._solve(advance, u0, None, initial)

    def adjoints(
        self, states: Tensor, sources: Tensor | None, last: Tensor | None, initial: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the adjoints (N/P + 1, b, ...) of this process's points, and the residuals' norms (cycles + 1,).

        Args:
            states: (N/P + 1, b, ...), of this process's points, at which the layers are linearized.
            sources: the loss's gradient with respect to all states, (N + 1, b, ...); None is zero, which several ranks
                need.
            last: a further one with respect to the last state, (b, ...), of which that of the last rank counts; None is
                zero. One of the two is given.
            initial: (N/P + 1, b, ...), the start of the adjoints; None starts at the last one.
        """
        parts = [part.detach() for part in (None if sources is None else sources[-1], last) if part is not None]
        cotangent = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        shape, is_alone = (len(self.own) + 1, *cotangent.shape), self.exchange.num_parts == 1
        advice = "Pass what mgrit returns."
        require(states.shape == shape, "states", states, f"the states of all points, {shape}", advice)
        # The coarse grids' layers, all of which this process needs, are some of the other processes'.
        stride = 1 if is_alone else self.method.grids(self.num_layers)[0].coarsening or 1
        everywhere = states if is_alone else self.exchange.gather(states[:-1:stride])
        fine = Linearised(self.evaluate, partial(states_at, states, begin=self.num_layers - self.own.stop))
        coarse = Linearised(self.evaluate, partial(states_at, everywhere, stride=stride))

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            # Point m of a mirrored grid of stride s is that of layer N - m s; behind it is layer N - (m + 1) s.
            first, last = (self.num_layers - (point + 1) * grid.stride for point in (points[-1], points[0]))
            jacobians = fine if grid.stride == 1 else coarse
            return jacobians.transposed(values, range(first, last + 1, points.step * grid.stride), self.h * grid.stride)

        return self._solve(advance, cotangent, sources, initial, is_mirrored=True)

    def tangents(self, states: Tensor, sources: Tensor) -> Tensor:
        """Return the tangents (N + 1, b, ...): what follows from `sources` (N + 1, b, ...) by the linearized layers."""
        jacobians = Linearised(self.evaluate, partial(states_at, states))

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            return jacobians.plain(values, grid.layers(points), self.h * grid.stride)

        return self._solve(advance, sources[0], sources, None)[0]

    def _solve(
        self, advance: Advance, first: Tensor, source: Tensor | None, initial: Tensor | None, is_mirrored: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Solve the recursion that begins at `first`."""
        shape = (len(self.own) + 1, *first.shape)
        origin = self.exchange.origin(first)
        if initial is None:
            values = origin.expand(shape).clone()
        else:
            advice = "Pass those of an earlier solve."
            require(initial.shape == shape, "initial", initial, f"one value per point, {shape}", advice)
            values = initial.detach().clone()
            if self.exchange.part == 0:
                values[-1 if is_mirrored else 0] = origin
        is_nested = self.method.nested and initial is None
        return solve(advance, origin, values, source, self.method, self.exchange, is_nested, is_mirrored)


def states_at(states: Tensor, layers: range, *, begin: int = 0, stride: int = 1) -> Tensor:
    """Return the states (k, b, ...) at which k layers begin, from those of some points, without a copy.

    Args:
        states: of one point in `stride`, from the point `begin` on.
        layers: the numbers of the k layers.
        begin: number of the first point.
        stride: from one point to the next.

    Example:
        >>> import torch
        >>> states_at(torch.arange(5.0), range(4, 8, 2), begin=4)
        tensor([0., 2.])
    """
    return states[(layers.start - begin) // stride : -((begin - layers.stop) // stride) : layers.step // stride]
