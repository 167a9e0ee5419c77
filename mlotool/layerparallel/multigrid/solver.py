"""MGRIT with full approximation storage for any two-term recursion: the engine of states, adjoints and tangents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.grids import Grid, check_names, make_grids

# values: (N_l + 1, b, ...), one point of the level after the other; source: the same; ahead: (num_chunks, b, ...)

Advance = Callable[[Grid, Tensor, range], Tensor]
"""`advance(grid, values, points)`: what follows the values (k, b, ...) at these k points of a grid, source aside."""


@dataclass(frozen=True)
class Method:
    """How the layers are coarsened, and how often.

    Args:
        coarsening: one factor for all levels, or one from each level to the next.
        levels: at most so many, the finest included; None for all.
        relaxation: "F" or "FCF", on all levels.
        cycles: at most so many.
        tolerance: ends at a residual of at most this; None takes all cycles.
        relative_tolerance: ends at a residual of at most this times that before the first cycle.
        cycle: "V", or "F".
        nested: whether the start comes from the coarser grids.
    """

    coarsening: int | Sequence[int] = 4
    levels: int | None = None
    relaxation: str = "FCF"
    cycles: int = 10
    tolerance: float | None = None
    relative_tolerance: float | None = None
    cycle: str = "V"
    nested: bool = False

    def __post_init__(self) -> None:
        check_names(self.relaxation, self.cycle)
        if not isinstance(self.cycles, int) or self.cycles < 0:
            raise ConfigError(f"cycles: found {self.cycles!r}; expected a whole number of at least 0. Correct cycles.")
        for key, value in (("tolerance", self.tolerance), ("relative_tolerance", self.relative_tolerance)):
            if value is not None and not value >= 0:
                raise ConfigError(f"{key}: found {value!r}; expected a number of at least 0, or null. Correct {key}.")


def solve(
    advance: Advance, values: Tensor, source: Tensor | None, method: Method, *, is_warm: bool = False
) -> tuple[Tensor, Tensor]:
    """Return v with `v^0 = values^0` and `v^{n+1} = Phi(v^n) + source^{n+1}`, as far as the cycles get.

    Args:
        advance: Phi, on each grid.
        values: the start (N + 1, b, ...); changed in place.
        source: the right-hand side G (N + 1, b, ...), of which the first point is not looked at; None is zero.
        method: of the solve.
        is_warm: whether the start is worth more than what nested iteration would make of its first point.

    Returns:
        The values, and the residuals' Frobenius norms (cycles + 1): after the first F-relaxation and after each cycle.
    """
    grids = make_grids(len(values) - 1, method.coarsening, method.levels)
    return _Solve(advance, grids, method).run(values, source, is_nested=method.nested and not is_warm)


class _Solve:
    """One solve: the recursion over the grids."""

    def __init__(self, advance: Advance, grids: Sequence[Grid], method: Method) -> None:
        self.advance = advance
        self.grids = grids
        self.method = method

    @torch.no_grad()
    def run(self, values: Tensor, source: Tensor | None, *, is_nested: bool) -> tuple[Tensor, Tensor]:
        """Iterate to the tolerance."""
        if is_nested:
            self._start_nested(values, source)
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
        grid = self.grids[level]
        corrected = values[grid.coarsening :: grid.coarsening]
        own = None if source is None else source[grid.coarsening :: grid.coarsening]
        if self.method.relaxation == "FCF":
            # C-relaxation needs no layer: the sweep before it has evaluated the last layer of each chunk.
            corrected.copy_(_plus(ahead, own))
            ahead = self._sweep(level, values, source)
        coarse = values[:: grid.coarsening].clone()
        # A_c(U_c) + R_c at the C-points, where U_c and the injected U cancel: the fine step minus the coarse one.
        below = self.grids[level + 1]
        coarse_source = torch.zeros_like(coarse)
        coarse_source[1:] = _plus(ahead, own) - self.advance(below, coarse[:-1], range(below.num_layers))
        self._solve(level + 1, coarse, coarse_source, kind)
        corrected.copy_(coarse[1:])

    def _solve(self, level: int, values: Tensor, source: Tensor | None, kind: str) -> None:
        """Solve a coarse system: exactly on the coarsest grid, else by one cycle, with "F" by an F- and a V-cycle."""
        if self.grids[level].coarsening is None:
            self._substitute(level, values, source)
            return
        for each in ("F", "V") if kind == "F" else ("V",):
            self._cycle(level, values, source, self._sweep(level, values, source), each)
        self._relax(level, values, source)

    def _start_nested(self, values: Tensor, source: Tensor | None) -> None:
        """Solve the coarsest grid, and on each finer one but the finest start from there with one V-cycle."""
        for level in range(len(self.grids) - 1, 0, -1):
            grid = self.grids[level]
            coarse = values[:: grid.stride].clone()
            injected = None if source is None else source[:: grid.stride]
            if grid.coarsening is None:
                self._substitute(level, coarse, injected)
            else:
                self._solve(level, coarse, injected, "V")
            values[:: grid.stride] = coarse

    def _sweep(self, level: int, values: Tensor, source: Tensor | None) -> Tensor:
        """F-relax, and return what the last layer of each chunk makes of it, source aside: C-points are left alone."""
        self._relax(level, values, source)
        grid = self.grids[level]
        assert grid.coarsening is not None
        return self._advanced(grid, values, grid.coarsening - 1)

    def _relax(self, level: int, values: Tensor, source: Tensor | None) -> None:
        grid = self.grids[level]
        assert grid.coarsening is not None
        for offset in range(grid.coarsening - 1):
            own = None if source is None else source[offset + 1 :: grid.coarsening]
            values[offset + 1 :: grid.coarsening] = _plus(self._advanced(grid, values, offset), own)

    def _advanced(self, grid: Grid, values: Tensor, offset: int) -> Tensor:
        """Advance the point of that offset in all chunks at once."""
        points = range(offset, grid.num_layers, grid.coarsening or 1)
        return self.advance(grid, values[offset : grid.num_layers : grid.coarsening or 1], points)

    def _substitute(self, level: int, values: Tensor, source: Tensor | None) -> None:
        for point in range(self.grids[level].num_layers):
            moved = self.advance(self.grids[level], values[point : point + 1], range(point, point + 1))[0]
            values[point + 1] = moved if source is None else moved + source[point + 1]

    def _norm(self, values: Tensor, source: Tensor | None, ahead: Tensor) -> Tensor:
        # After F-relaxation the residual of the F-points is zero, so that of the C-points is all of it.
        step = self.grids[0].coarsening
        own = None if source is None else source[step::step]
        return torch.linalg.vector_norm(_plus(ahead, own) - values[step::step])

    def _target(self, first: Tensor) -> float | None:
        targets = [] if self.method.tolerance is None else [self.method.tolerance]
        if self.method.relative_tolerance is not None:
            targets.append(self.method.relative_tolerance * float(first))
        return max(targets, default=None)


def _plus(values: Tensor, source: Tensor | None) -> Tensor:
    return values if source is None else values + source
