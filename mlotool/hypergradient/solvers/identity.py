"""The inverse of a multiple of the identity."""

from dataclasses import dataclass

from mlotool.core.settings import Positive, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import scaled


@target("solver")
@dataclass(frozen=True)
class Identity(AbstractSolver):
    """`q = step_size * v`: H is taken for the identity over `step_size`.

    With the finite-difference product this is the update of DARTS (Liu et al. 2019, Eq. 7), which Betty calls
    AID-FD; with the reverse product it is the one-step truncation T1-T2 (Luketina et al. 2016).

    Args:
        step_size: the factor; with a lower learning rate here it is the gradient through one SGD step.

    Cost: no product.

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
