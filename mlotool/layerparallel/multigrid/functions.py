"""States, adjoints and tangents of residual layers as autograd functions: each one's backward is made of the others.

With `A` the linearised system `(A v)^0 = v^0`, `(A v)^{n+1} = v^{n+1} - Phi_n' v^n`, and theta the parameters:

    states U(u0, theta)            dU = A^-1 (du0, dPhi/dtheta dtheta)
    adjoints w = A^-T g            dw = A^-T (dg + d(Phi'^T) w)
    tangents v = A^-1 g            dv = A^-1 (dg + d(Phi') v)

so that derivatives of any order are multigrid solves. They are exact where the solves have converged.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mlotool.layerparallel.multigrid.steps import Evaluate

# states, adjoints, tangents, cotangents: (N + 1, b, ...)


Gradient = list[Tensor | None]
"""With respect to u0 and to each parameter."""


class _System(Protocol):
    """The solves for one batch."""

    num_layers: int
    h: float

    def evaluate(self, theta: Sequence[Tensor]) -> Evaluate:
        """Return the layers with these parameters."""

    def solve_states(self, u0: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return U."""

    def solve_adjoints(
        self, states: Tensor, sources: Tensor | None, last: Tensor | None, theta: Sequence[Tensor], *, is_first: bool
    ) -> Tensor:
        """Return `A^-T g` with `g^n` = sources^n (None: zero), and `last` added to g^N.

        `is_first`: of a first derivative, as every training step has one.
        """

    def solve_tangents(self, states: Tensor, sources: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return `A^-1 g`."""

    def inspect(
        self, gradient: Gradient, last: Tensor, again: "Callable[[_System], tuple[Gradient, Tensor]]"
    ) -> Gradient:
        """See the gradient before it is handed on; return it, or a better one.

        `again` finds the gradient and the last state by another system.
        """


class States(torch.autograd.Function):
    """Autograd function of the states U of u0 and theta.

        U^0 = u0,    U^{n+1} = Phi_n(U^n)

    Its arguments are the system of the solves (`BatchSystem`), u0 (b, ...) and the parameters, of any shapes. It
    returns the states (N + 1, b, ...) and the last of them (b, ...), which is all that most losses read. The backward
    is one adjoint solve and one product with the layers' derivatives; it is differentiable again.

    Source: Günther et al. 2020, arXiv 1812.04352, sections 3.1 and 3.2.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> from mlotool.layerparallel.multigrid.system import BatchSystem
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> names, theta = zip(*part.layers.named_parameters())
        >>> u0 = torch.ones(2, 3, requires_grad=True)
        >>> states, last = States.apply(BatchSystem(part, names, u0, index=None), u0, *theta)
        >>> states.shape, last.shape
        (torch.Size([17, 2, 3]), torch.Size([2, 3]))
        >>> torch.autograd.grad(last.sum(), u0)[0].shape
        torch.Size([2, 3])
    """

    @staticmethod
    def forward(ctx: Any, system: _System, u0: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states and the last of them, by one solve."""
        states = system.solve_states(u0, theta)
        ctx.system = system
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, *theta)
        return states, states[-1].clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return `w^0` and `sum_n (dPhi_n/dtheta)^T w^{n+1}`, all layers in one product."""
        states, *theta = ctx.saved_tensors
        system: _System = ctx.system
        sources, last = cotangents
        if sources is None and last is None:
            return None, None, *(None for _ in theta)

        def gradient_at(system: _System, states: Tensor) -> Gradient:
            adjoints: Tensor = _Adjoints.apply(system, True, states, sources, last, *theta)
            return [adjoints[0], *_weight_gradient(system, states, adjoints, theta, ctx.needs_input_grad[2:])]

        def again(other: _System) -> tuple[Gradient, Tensor]:
            found = other.solve_states(states[0], theta)
            return gradient_at(other, found), found[-1]

        gradient = gradient_at(system, states)
        with torch.no_grad():
            detached = [None if each is None else each.detach() for each in gradient]
            inspected = system.inspect(detached, states[-1], again)
        # A gradient that will be differentiated again stays what its graph says.
        return None, *(gradient if torch.is_grad_enabled() else inspected)


class _Adjoints(torch.autograd.Function):
    """`w = A^-T g` of the states, g and theta; g is given at all points, or at the last one, or as the sum of both."""

    @staticmethod
    def forward(
        ctx: Any,
        system: _System,
        is_first: bool,
        states: Tensor,
        sources: Tensor | None,
        last: Tensor | None,
        *theta: Tensor,
    ) -> Tensor:
        """Solve."""
        adjoints = system.solve_adjoints(states, sources, last, theta, is_first=is_first)
        ctx.system = system
        ctx.is_given = sources is not None, last is not None
        ctx.save_for_backward(states, adjoints, *theta)
        return adjoints

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Return the derivatives with respect to the states, g and theta."""
        states, adjoints, *theta = ctx.saved_tensors
        tangents: Tensor = _Tangents.apply(ctx.system, states, cotangents[0], *theta)
        along_states, along_theta = _curvature(ctx.system, states, adjoints, tangents, theta)
        has_sources, has_last = ctx.is_given
        along_g = tangents if has_sources else None, tangents[-1] if has_last else None
        return None, None, along_states, *along_g, *along_theta


class _Tangents(torch.autograd.Function):
    """`v = A^-1 g` of the states, g and theta."""

    @staticmethod
    def forward(ctx: Any, system: _System, states: Tensor, sources: Tensor, *theta: Tensor) -> Tensor:
        """Solve."""
        tangents = system.solve_tangents(states, sources, theta)
        ctx.system = system
        ctx.save_for_backward(states, tangents, *theta)
        return tangents

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Return the derivatives with respect to the states, g and theta."""
        states, tangents, *theta = ctx.saved_tensors
        adjoints: Tensor = _Adjoints.apply(ctx.system, False, states, cotangents[0], None, *theta)
        along_states, along_theta = _curvature(ctx.system, states, adjoints, tangents, theta)
        return None, along_states, adjoints, *along_theta


def _weight_gradient(
    system: _System, states: Tensor, adjoints: Tensor, theta: Sequence[Tensor], is_needed: Sequence[bool]
) -> list[Tensor | None]:
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Derivatives are taken at aliases: the states depend on theta too, and that path is the adjoints'.
        at, aliases = _alias(states, keeps_graph), [_alias(tensor, keeps_graph) for tensor in theta]
        moved = system.evaluate(aliases)(at[:-1], range(system.num_layers), system.h)
    wanted = [alias for alias, needed in zip(aliases, is_needed, strict=True) if needed]
    if not wanted:
        return [None] * len(theta)
    found = iter(torch.autograd.grad(moved, wanted, adjoints[1:], create_graph=keeps_graph, allow_unused=True))
    return [next(found) if needed else None for needed in is_needed]


def _curvature(
    system: _System, states: Tensor, adjoints: Tensor, tangents: Tensor, theta: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the derivatives of `sum_n <w^{n+1}, Phi_n' v^n>` with respect to the states and theta, w and v fixed."""
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        at, aliases = _alias(states, keeps_graph), [_alias(tensor, keeps_graph) for tensor in theta]
        moved = system.evaluate(aliases)(at[:-1], range(system.num_layers), system.h)
        pulled = torch.autograd.grad(moved, at, adjoints[1:], create_graph=True)[0]
        if not pulled.requires_grad:
            # Layers that are linear in their state and have no parameters.
            return torch.zeros_like(states), [None] * len(theta)
        value = (pulled * tangents).sum()
        wanted = [at, *(alias for alias in aliases if alias.requires_grad)]
        found = torch.autograd.grad(value, wanted, create_graph=keeps_graph, allow_unused=True)
    slopes = iter(found[1:])
    along_states = torch.zeros_like(states) if found[0] is None else found[0]
    return along_states, [next(slopes) if alias.requires_grad else None for alias in aliases]


def _alias(tensor: Tensor, keeps_graph: bool) -> Tensor:
    if not keeps_graph:
        return tensor.detach().requires_grad_()
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
