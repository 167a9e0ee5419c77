"""The control: no gradient through a solution."""

from dataclasses import dataclass

from torch import Tensor

from mlotool.core.settings import target
from mlotool.hypergradient.vector import zeros
from mlotool.problem.interface import AbstractHypergradient, LowerView, Vector


@target("hypergradient")
@dataclass(frozen=True)
class FirstOrder(AbstractHypergradient):
    """No gradient through the solution: it counts as a constant, which leaves the direct gradient of the upper loss.

        dtheta*/dx = 0

    Cost: none.

    Example:
        >>> FirstOrder().curvature
        'total'
    """

    can_push = True
    is_constant = True
    is_traceable = True

    def pullback(self, view: LowerView, inputs: Vector) -> None:
        """Return None: the solution is a constant."""
        return

    def push(self, view: LowerView, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return zeros: the solution does not move."""
        return zeros(view.theta)
