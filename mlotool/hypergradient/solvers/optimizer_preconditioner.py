"""The optimizer's step in place of the inverse."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import OVERFLOW, AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.solvers.progress import Progress, measured
from mlotool.hypergradient.vector import choose, leaves, norm, vector_jacobian
from mlotool.program.differentiation import LowerLoss, Vector

_NO_STEP = (
    "OptimizerPreconditioner: found no optimizer step to differentiate; expected lower_loss.optimizer_step. Use it "
    "inside Implicit, at a problem with an optimizer."
)


@dataclass
class OptimizerPreconditioner(AbstractSolver):
    """`q = (du/dg)^T v` for the optimizer's next update `theta <- theta - u(g)` at the current gradient g (SAMA).

    H is taken for the identity and the optimizer adapts it: `lr v` for SGD, and for Adam nearly `v` over the root of
    the second moment. The Jacobian is that of the problem's own pure step, its clipping, momentum and schedule
    included, so that it holds for each optimizer that has one (SGD, Adam, AdamW).

    Cost: no product; a gradient (none for SGD without clipping, whose step is linear in it), an optimizer step back.

    Source: Choe et al. 2023 (arXiv 2310.05674).

    Example:
        >>> import torch
        >>> from mlotool.program.differentiation import LowerLoss
        >>> step = lambda theta, gradient: [theta[0] - 0.1 * gradient[0]]
        >>> loss = LowerLoss("w", (torch.ones(2),), lambda theta, inputs: theta[0].sum(), optimizer_step=step)
        >>> OptimizerPreconditioner().solve(lambda u: u, [torch.ones(2)], lower_loss=loss).solution
        [tensor([0.1000, 0.1000])]
    """

    needs_products: ClassVar[bool] = False
    uses_loss: ClassVar[bool] = True
    is_differentiable: ClassVar[bool] = False
    failures: ClassVar[Mapping[Status, str]] = {Status.NON_FINITE: f"v itself (as by Identity) is used. {OVERFLOW}"}

    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, lower_loss: LowerLoss | None = None
    ) -> SolveResult:
        """Return the adapted vector."""
        if lower_loss is None or lower_loss.optimizer_step is None:
            raise ConfigError(_NO_STEP)
        with torch.enable_grad():
            gradient = leaves(_zeros(lower_loss) if lower_loss.has_linear_step else _gradient(lower_loss))
            theta = [tensor.detach() for tensor in lower_loss.theta]
            moved = lower_loss.optimizer_step(theta, gradient)
            adapted = vector_jacobian(moved, gradient, vector, retain=False)
        solution = list(torch._foreach_neg(adapted))
        num_tasks = lower_loss.num_tasks
        progress = Progress(tasks_of(lower_loss), Status.FIXED)
        failed = progress.end(~measured(norm(solution, num_tasks)).isfinite(), Status.NON_FINITE)
        return progress.result(choose(failed, vector, solution), 0)


def _zeros(lower_loss: LowerLoss) -> Vector:
    return [torch.zeros_like(tensor) for tensor in lower_loss.theta]


def _gradient(lower_loss: LowerLoss) -> Vector:
    point = leaves(lower_loss.theta)
    loss = lower_loss(point, ())
    return lower_loss.reduce(vector_jacobian([loss], point, [torch.ones_like(loss)], retain=False))
