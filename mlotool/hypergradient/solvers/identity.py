"""The inverse of a multiple of the identity."""

from dataclasses import dataclass

from mlotool.core.settings import Positive, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import scaled


@target("solver")
@dataclass(frozen=True)
class Identity(AbstractSolver):
    """Approximates H by a multiple of the identity matrix.

        q = step_size * v,   as if H = I / step_size

    With the finite-difference product this is the update of DARTS (Liu et al. 2019, Eq. 7), which Betty calls
    AID-FD; with the reverse product it is the one-step truncation T1-T2 (Luketina et al. 2016).

    Args:
        step_size: the factor. With the learning rate of the lower problem, the result is the gradient through one SGD
            step.

    Cost: no Hessian-vector product.

    Example:
        >>> import torch
        >>> Identity(0.5).solve(lambda u: u, [torch.ones(2)]).solution
        [tensor([0.5000, 0.5000])]
    """

    step_size: Positive = 1.0
    is_traceable = True
    is_polynomial = True
    needs_products = False

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return `step_size * v`."""
        solution = list(vector) if self.step_size == 1.0 else scaled(vector, self.step_size)
        return SolveResult(solution, Status.FIXED, 0, None, (Status.FIXED,) * (base.tasks_of(view) or 0))
