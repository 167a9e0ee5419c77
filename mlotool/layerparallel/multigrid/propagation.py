"""MGRIT for the states and the adjoints of a residual network, as functions."""

import inspect
import math
from typing import Any

from torch import Tensor, nn

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.exchange import Exchange
from mlotool.layerparallel.multigrid.grids import Grid
from mlotool.layerparallel.multigrid.settings import Method
from mlotool.layerparallel.multigrid.solver import Advance, solve
from mlotool.layerparallel.multigrid.steps import BatchedStep, Evaluate, Linearised, Step, batched, layers_of, states_at


def mgrit(
    step: Step | BatchedStep,
    u0: Tensor,
    num_layers: int,
    h: float,
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
    _check_solve(step, h, group, u0=u0)
    how = num_layers, float(h), Method(**method), initial, Exchange(group)
    states, residuals = solve_states(batched(step), u0, *how)
    return states, residuals.tolist()


def mgrit_adjoint(
    step: Step | BatchedStep,
    states: Tensor,
    cotangent: Tensor,
    num_layers: int,
    h: float,
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
    _check_solve(step, h, group, states=states, cotangent=cotangent)
    how = num_layers, float(h), Method(**method), initial, Exchange(group, is_mirrored=True)
    adjoints, residuals = solve_adjoints(batched(step), states, (None, cotangent), *how)
    return adjoints, residuals.tolist()


def solve_states(
    evaluate: Evaluate,
    u0: Tensor,
    num_layers: int,
    h: float,
    method: Method,
    initial: Tensor | None,
    exchange: Exchange,
) -> tuple[Tensor, Tensor]:
    """Return the states of this process's points, and the residuals, as `mgrit` does.

    Args:
        evaluate: the layers, many of them in one call.
        u0: (b, ...), the first state; on several ranks that of the first one counts.
        num_layers: N, of all ranks.
        h: step of the finest grid.
        method: how the layers are coarsened, and how often.
        initial: (N/P + 1, b, ...), the start of the points on P ranks; None starts at u0.
        exchange: with the ranks that have the other layers.

    Returns:
        The states (N/P + 1, b, ...), and the residuals' norms (cycles + 1,).

    Raises:
        ConfigError: chunks cannot be divided over the ranks, or `initial` has another shape.

    Example:
        >>> import torch
        >>> evaluate, method = batched(lambda u, n, h: u - h * u), Method(relaxation="F", cycles=4)
        >>> states, residuals = solve_states(evaluate, torch.ones(2, 1), 16, 0.1, method, None, Exchange())
        >>> states.shape, residuals.shape
        (torch.Size([17, 2, 1]), torch.Size([5]))
    """
    own = method.grids(num_layers)[0].part(exchange.part, exchange.num_parts)
    origin = exchange.origin(u0)

    def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
        return evaluate(values, layers_of(grid, points), h * grid.stride)

    values = start_of(origin, len(own), initial, place=0 if exchange.part == 0 else None)
    return solve(advance, origin, values, None, method, is_warm=initial is not None, exchange=exchange)


def solve_adjoints(
    evaluate: Evaluate,
    states: Tensor,
    slopes: tuple[Tensor | None, Tensor | None],
    num_layers: int,
    h: float,
    method: Method,
    initial: Tensor | None,
    exchange: Exchange,
) -> tuple[Tensor, Tensor]:
    """Return the adjoints of this process's points, and the residuals, as `mgrit_adjoint` does.

    Args:
        evaluate: the layers, many of them in one call.
        states: (N/P + 1, b, ...), of this process's points on P ranks, at which the layers are linearised.
        slopes: the loss's gradient with respect to all states, (N + 1, b, ...), of which None is zero, as several ranks
            need it; and a further one with respect to the last state, (b, ...), of which that of the last rank counts.
            One of the two is given.
        num_layers: N, of all ranks.
        h: step of the finest grid.
        method: how the layers are coarsened, and how often.
        initial: (N/P + 1, b, ...), the start of the adjoints; None starts at the last one.
        exchange: with the ranks that have the other layers, from the last rank to the first.

    Returns:
        The adjoints (N/P + 1, b, ...), and the residuals' norms (cycles + 1,).

    Raises:
        ConfigError: chunks cannot be divided over the ranks, or `states` or `initial` has another shape.

    Example:
        >>> import torch
        >>> evaluate, how = batched(lambda u, n, h: u - h * u), (16, 0.1, Method(relaxation="F", cycles=4))
        >>> slopes = None, torch.ones(2, 1)
        >>> adjoints, _ = solve_adjoints(evaluate, torch.ones(17, 2, 1), slopes, *how, None, Exchange())
        >>> adjoints.shape
        torch.Size([17, 2, 1])
    """
    sources, last = slopes
    parts = [each.detach() for each in (None if sources is None else sources[-1], last) if each is not None]
    cotangent = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    grid = method.grids(num_layers)[0]
    own = grid.part(exchange.part, exchange.num_parts)
    if states.shape != (len(own) + 1, *cotangent.shape):
        raise ConfigError(
            f"states: found the shape {tuple(states.shape)}; expected {(len(own) + 1, *cotangent.shape)}, the states "
            "of all points in the cotangent's shape. Pass what mgrit returns."
        )
    origin, begin = exchange.origin(cotangent), num_layers - own.stop
    # The coarse grids' layers, all of which this process needs, are some of the other processes'.
    coarse = states if exchange.num_parts == 1 else exchange.gather(states[: -1 : grid.coarsening])
    factor = 1 if exchange.num_parts == 1 else grid.coarsening or 1

    def own_at(layers: range) -> Tensor:
        return states_at(states, range(layers.start - begin, layers.stop - begin, layers.step))

    def coarse_at(layers: range) -> Tensor:
        return states_at(coarse, range(layers.start // factor, -(-layers.stop // factor), layers.step // factor))

    fine_advance, coarse_advance = (transposed(Linearised(evaluate, at), h, num_layers) for at in (own_at, coarse_at))

    def advance(each: Grid, values: Tensor, points: range) -> Tensor:
        return (fine_advance if each.stride == 1 else coarse_advance)(each, values, points)

    values = start_of(origin, len(own), initial, place=-1 if exchange.part == 0 else None)
    is_warm = initial is not None
    return solve(advance, origin, values, sources, method, is_warm=is_warm, is_mirrored=True, exchange=exchange)


def transposed(jacobians: Linearised, step_size: float, num_layers: int) -> Advance:
    """Return what advances adjoints in `solve`: products with the transposed Jacobians of the layers.

    Adjoints are solved as a mirrored recursion: point m of a grid of stride s is that of layer `N - m s`, and is
    followed through layer `N - (m + 1) s`.

    Args:
        jacobians: of the layers, at the states.
        step_size: h, of the finest grid.
        num_layers: N, of the finest grid.

    Example:
        >>> import torch
        >>> states = torch.ones(3, 1, 1)
        >>> jacobians = Linearised(batched(lambda u, n, h: u + h * u**2), lambda layers: states_at(states, layers))
        >>> advance = transposed(jacobians, step_size=0.5, num_layers=2)
        >>> advance(Grid(num_layers=2, stride=1, coarsening=None), torch.ones(1, 1, 1), range(1))
        tensor([[[2.]]])
    """

    def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
        stride = grid.stride
        first, last = (num_layers - (point + 1) * stride for point in (points[-1], points[0]))
        return jacobians.transposed(values, range(first, last + 1, points.step * stride), step_size * stride)

    return advance


def start_of(first: Tensor, num_layers: int, initial: Tensor | None, *, place: int | None = 0) -> Tensor:
    """Return where the points of a solve start, (N + 1, b, ...): a new tensor, which the solve may change.

    Args:
        first: (b, ...), the value at which the recursion begins.
        num_layers: N.
        initial: (N + 1, b, ...), the start that was given; None starts all points at `first`.
        place: of `first` in `initial`; None where another rank has the first point.

    Raises:
        ConfigError: `initial` has another shape.

    Example:
        >>> import torch
        >>> start_of(torch.ones(1), 2, initial=torch.zeros(3, 1)).flatten()
        tensor([1., 0., 0.])
    """
    first = first.detach()
    if initial is None:
        return first.expand(num_layers + 1, *first.shape).clone()
    if initial.shape != (num_layers + 1, *first.shape):
        raise ConfigError(
            f"initial: found the shape {tuple(initial.shape)}; expected {(num_layers + 1, *first.shape)}, one value a "
            "point. Pass the states of an earlier solve, or leave initial out."
        )
    values = initial.detach().clone()
    if place is not None:
        values[place] = first
    return values


def _check_solve(step: Any, h: Any, group: Any, **tensors: Any) -> None:
    """Refuse arguments of `mgrit` and `mgrit_adjoint` that are of a wrong kind."""
    expected = "a function step(u, n, h) that returns the state after layer n, or a BatchedStep"
    require(_is_step(step), "step", step, expected, "Write one: def step(u, n, h): return u + h * layers[n](u).")
    require(is_number(h) and math.isfinite(h), "h", h, "a finite number", "Give the step of the finest grid.")
    for key, value in tensors.items():
        is_right = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        require(is_right, key, value, "a tensor of floating-point numbers", "Make it one: torch.as_tensor(x).float().")
    # Which classes are groups is torch's matter.
    is_group = not isinstance(group, bool | int | float | str | list)
    require(is_group, "group", group, "a torch.distributed group or null", "Make it by torch.distributed.new_group().")


def _is_step(step: Any) -> bool:
    if hasattr(step, "many"):
        return True
    if not callable(step) or isinstance(step, type):
        return False
    try:
        inspect.signature(step.forward if isinstance(step, nn.Module) else step).bind(None, 0, 1.0)
    except TypeError:
        return False
    except ValueError:  # of compiled code, which has no signature
        return True
    return True
