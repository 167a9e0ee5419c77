"""The optimizer's step in place of the inverse."""

from dataclasses import dataclass

import torch

from mlotool.core.errors import ConfigError
from mlotool.core.settings import target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Vector, View
from mlotool.problem.interface import LowerView


@target("solver")
@dataclass(frozen=True)
class OptimizerPreconditioner(AbstractSolver):
    """The optimizer's update rule in place of the inverse Hessian (SAMA).

        q = (du/dg)^T v   for the optimizer's next update theta <- theta - u(g) at the current gradient g

    For SGD q is `lr v`; for Adam it is nearly `v` divided by the root of the second moment. du/dg is the Jacobian of
    the problem's own optimizer step, including clipping, momentum and learning-rate schedule. Supported are SGD, Adam
    and AdamW.

    Cost: no Hessian-vector product; one gradient (none for SGD without clipping, whose step is linear in the gradient)
    and the backward pass of one optimizer step.

    Raises:
        ConfigError: the problem's optimizer is not supported, or the solver is not used inside `Implicit`.

    Source: Choe et al. 2023 (arXiv 2310.05674).

    Example:
        >>> import torch
        >>> from mlotool.program import LowerProblem, LowerView
        >>> pullback = lambda theta, gradient, cotangent: [-0.1 * cotangent[0]]
        >>> loss = LowerView(
        ...     LowerProblem("w"), (torch.ones(2),), lambda theta, inputs: theta[0].sum(), step_pullback=pullback
        ... )
        >>> OptimizerPreconditioner().solve(lambda u: u, [torch.ones(2)], view=loss).solution
        [tensor([0.1000, 0.1000])]
    """

    needs_products = False
    is_differentiable = False
    failures = base.NOT_FINITE

    def uses_loss(self, view: LowerView) -> bool:
        """Return whether the step's derivative is another one at each gradient."""
        return not view.problem.has_linear_step

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the adapted vector."""
        if view is None or view.step_pullback is None:
            raise ConfigError("OptimizerPreconditioner: found no optimizer step; expected one. Use it inside Implicit.")
        # The derivative of a step that is linear in the gradient is the same at any: theta stands for it.
        gradient = view.theta if view.problem.has_linear_step else view.gradient(view.theta, ())
        solution = list(torch._foreach_neg(view.step_pullback(view.theta, gradient, vector)))
        return base.finished(vector, solution, view.problem.num_tasks)
