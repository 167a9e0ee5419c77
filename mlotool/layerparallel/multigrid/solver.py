"""MGRIT with full approximation storage for any two-term recursion: the engine of states, adjoints and tangents."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.layerparallel.exchange import Exchange
from mlotool.layerparallel.multigrid.grids import Grid
from mlotool.layerparallel.multigrid.settings import Method

# values: (N_l + 1, b, ...), one point of the level after the other; source: the same; ahead: (num_chunks, b, ...)
# A recursion that runs from the last layer to the first is mirrored: its point m lies at N_l - m, so that points which
# are taken together are in the order of their layers, whichever way it runs.

Advance = Callable[[Grid, Tensor, range], Tensor]
"""`advance(grid, values, points)`: what follows the values (k, b, ...) at these k points of a grid, source aside; of a
mirrored recursion the values are in the opposite order of the points."""


def solve(
    advance: Advance,
    origin: Tensor,
    values: Tensor,
    source: Tensor | None,
    method: Method,
    *,
    is_warm: bool = False,
    is_mirrored: bool = False,
    exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor]:
    """Return v with `v^0 = origin` and `v^{n+1} = Phi(v^n) + source^{n+1}`, as far as the cycles get.

    Args:
        advance: Phi, on each grid.
        origin: (b, ...), the first value.
        values: the start (N + 1, b, ...), changed in place; of several ranks, that of this rank's part.
        source: the right-hand side G (N + 1, b, ...), of which the first point is not looked at; None is zero, which
            several ranks need.
        method: how the layers are coarsened, and how often.
        is_warm: whether the start is worth more than what nested iteration would make of the origin.
        is_mirrored: whether v^n lies at N - n, in the start, the right-hand side and the result.
        exchange: with the ranks that have the other layers; None: this process has all of them.

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
    grids = method.grids((len(values) - 1) * exchange.num_parts)
    solver = _Solve(advance, origin, grids, method, exchange, is_mirrored=is_mirrored)
    return solver.run(values, source, is_nested=method.nested and not is_warm)


class _Solve:
    """One solve: the recursion over the grids. Of the finest one it has a part, of the others all."""

    def __init__(
        self,
        advance: Advance,
        origin: Tensor,
        grids: Sequence[Grid],
        method: Method,
        exchange: Exchange,
        *,
        is_mirrored: bool,
    ) -> None:
        self.advance = advance
        self.origin = origin
        # The points at hand, by level: a part of the finest grid, and all of the others.
        self.points = (
            grids[0].part(exchange.part, exchange.num_parts),
            *(range(grid.num_layers) for grid in grids[1:]),
        )
        self.grids = grids
        self.method = method
        self.exchange = exchange
        self.is_mirrored = is_mirrored

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
        for each in ("F", "V") if kind == "F" else ("V",):
            self._cycle(level, values, source, self._sweep(level, values, source), each)
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
