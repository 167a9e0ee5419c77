"""MGRIT for the states and the adjoints of a residual network, as functions."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Finite, checked
from mlotool.layerparallel.exchange import Exchange
from mlotool.layerparallel.multigrid.solver import Advance, Grid, Method, solve
from mlotool.layerparallel.multigrid.steps import BatchedStep, Evaluate, Linearised, Step, batched


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
            the last one before them. Ranks exchange C-points with their neighbours, and gather the C-points and their
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
        states: (N + 1, b, ...), at which the layers are linearised; the last one is not looked at.
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
            states: (N/P + 1, b, ...), of this process's points, at which the layers are linearised.
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
        """Return the tangents (N + 1, b, ...): what follows from `sources` (N + 1, b, ...) by the linearised layers."""
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
            require(initial.shape == shape, "initial", initial, f"one value a point, {shape}", advice)
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
