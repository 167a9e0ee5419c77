"""The derivative of an implicit pullback, for problems that are nested above it.

    theta*_l(x) solves F(theta, x) = dC_l/dtheta = 0, so for a cotangent v
        q = H^-1 v,   cotangent of x = -M^T q,   with H = dF/dtheta and M = dF/dx.

A problem that is nested above l needs the derivative of this pullback (autograd then runs it with gradients
enabled). So that it is exact to any order,
- the node saves its OUTPUTS: differentiating the pullback with respect to theta leads back into the node;
- partial derivatives are taken at aliases of theta*_l and of x, so that one with respect to x does not run
  through theta*_l again;
- the solve is a node of its own (`LinearSolve`), differentiated implicitly: dq = H^-1 (dv - dH q).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mlotool.core.twice_differentiable import twice_differentiable
from mlotool.hypergradient.solvers import AbstractSolver, SolveResult
from mlotool.hypergradient.vector import aliases, vector_jacobian
from mlotool.problem.interface import LowerView, Vector


class LinearPullback(Protocol):
    """What an implicit one offers beside.

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.solvers import Exact
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0] ** 4 / 12 - theta[0] * inputs[0]).sum()  # H = theta ** 2, M = -1
        >>> class Solving:
        ...     view, solver = LowerView(LowerProblem("w"), (torch.tensor([2.0]),), loss), Exact()
        ...     def solve(self, theta, inputs, vector): return [v / theta[0] ** 2 for v in vector]
        ...     def record(self, result): pass
        >>> pullback: LinearPullback = Solving()
        >>> pullback.solve([torch.tensor([2.0])], [torch.zeros(1)], [torch.ones(1)])
        [tensor([0.2500])]
    """

    solver: AbstractSolver

    @property
    def view(self) -> LowerView:
        """The loss, with the same random numbers in all evaluations."""

    def solve(self, theta: Vector, inputs: Vector, vector: Vector) -> list[Tensor]:
        """Return `H^-1 v`, without a graph."""

    def record(self, result: SolveResult) -> None:
        """Keep how a solve ended, and warn of a failure."""


class LinearSolve(torch.autograd.Function):
    """`q = H(theta, x)^-1 v`, differentiated as the exact solution.

    For a cotangent w: p = H^-1 w is the cotangent of v, and `-d<p, H q>/d(theta, x)` that of theta and x.

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.solvers import Exact
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0] ** 4 / 12 - theta[0] * inputs[0]).sum()  # H = theta ** 2, M = -1
        >>> class Solving:
        ...     view, solver = LowerView(LowerProblem("w"), (torch.tensor([2.0]),), loss), Exact()
        ...     def solve(self, theta, inputs, vector): return [v / theta[0] ** 2 for v in vector]
        ...     def record(self, result): pass
        >>> v, theta, x = torch.ones(1), torch.tensor([2.0], requires_grad=True), torch.zeros(1)
        >>> [q] = LinearSolve.apply(Solving(), 1, v, theta, x)
        >>> torch.autograd.grad(q, theta)  # of v / theta ** 2
        (tensor([-0.2500]),)
    """

    @staticmethod
    def forward(ctx: Any, pullback: LinearPullback, num_parameters: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Solve; `tensors` are v, theta and x."""
        vector, theta, inputs = _split(tensors, num_parameters)
        outputs = tuple(pullback.solve(theta, inputs, vector))
        # A solver may hand v itself on; a node's output must be a tensor of its own.
        outputs = tuple(q.clone() if any(q is v for v in vector) else q for q in outputs)
        ctx.pullback, ctx.num_parameters = pullback, num_parameters
        ctx.save_for_backward(*outputs, *theta, *inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return the cotangents of v, theta and x."""
        pullback, count = ctx.pullback, ctx.num_parameters
        solution, theta, inputs = _split(ctx.saved_tensors, count)
        is_differentiable = torch.is_grad_enabled()
        with pullback.view.problem.random:
            if is_differentiable:
                adjoint = list(LinearSolve.apply(pullback, count, *cotangent, *theta, *inputs))
            else:
                adjoint = pullback.solve(theta, inputs, cotangent)
        wanted = ctx.needs_input_grad[2 + count :]
        with pullback.view.problem.random, torch.enable_grad():
            if not is_differentiable:
                solution = [tensor.detach() for tensor in solution]
                theta = [tensor.detach().requires_grad_() for tensor in theta]
                inputs = [
                    tensor.detach().requires_grad_(flag) for tensor, flag in zip(inputs, wanted[count:], strict=True)
                ]
            theta, inputs = aliases(theta), aliases(inputs)
            gradient = stationarity(pullback.view, theta, inputs)
            # Both solutions are the same on all ranks; what is found for theta and x is this rank's part.
            shared = pullback.view.problem.rank_mean.shared
            product = vector_jacobian(gradient, theta, shared(solution), create_graph=True)
            points = [point for point, flag in zip((*theta, *inputs), wanted, strict=True) if flag]
            found = vector_jacobian(product, points, shared(adjoint), create_graph=is_differentiable)
        values = iter(found)
        return (None, None, *adjoint, *(-next(values) if flag else None for flag in wanted))


def differentiable_pullback(
    pullback: LinearPullback, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector
) -> list[Tensor]:
    """Return the cotangents of the wanted inputs as functions of theta, x and the cotangent.

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.solvers import Exact
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0] ** 4 / 12 - theta[0] * inputs[0]).sum()  # H = theta ** 2, M = -1
        >>> class Solving:
        ...     view, solver = LowerView(LowerProblem("w"), (torch.tensor([2.0]),), loss), Exact()
        ...     def solve(self, theta, inputs, vector): return [v / theta[0] ** 2 for v in vector]
        ...     def record(self, result): pass
        >>> theta, x = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> [found] = differentiable_pullback(Solving(), [theta], [x], [True], [torch.ones(1)])
        >>> found.tolist(), torch.autograd.grad(found, theta)
        ([0.25], (tensor([-0.2500]),))
    """
    points, values = aliases(theta), aliases(inputs)
    gradient = stationarity(pullback.view, points, values)
    if pullback.solver.is_polynomial:
        matvec = pullback.view.mean_of(lambda vector: vector_jacobian(gradient, points, vector, create_graph=True))
        result = pullback.solver.solve(matvec, cotangent, view=pullback.view)
        pullback.record(result)
        solution: Vector = result.solution
    else:
        solution = LinearSolve.apply(pullback, len(theta), *cotangent, *theta, *inputs)
    sources = [value for value, flag in zip(values, wanted, strict=True) if flag]
    solution = pullback.view.problem.rank_mean.shared(solution)
    return [-found for found in vector_jacobian(gradient, sources, solution, create_graph=True)]


def stationarity(view: LowerView, theta: Vector, inputs: Vector) -> list[Tensor]:
    """Return `F = dC_l/dtheta` on this rank's part of the batch, with its graph, one tensor a parameter.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0], requires_grad=True)], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> [each.tolist() for each in stationarity(view, theta, inputs)]
        [[2.0]]
    """
    problem, devices = view.problem, view.devices
    loss = twice_differentiable(problem.name, problem.traits, devices, lambda: view.own_loss(theta, inputs))
    return vector_jacobian([loss], theta, [torch.ones_like(loss)], create_graph=True)


def _split(tensors: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return list(tensors[:count]), list(tensors[count : 2 * count]), list(tensors[2 * count :])
