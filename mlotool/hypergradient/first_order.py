"""The control: no gradient through a solution."""

from dataclasses import dataclass

from torch import Tensor

from mlotool.core.settings import target
from mlotool.hypergradient.vector import zeros
from mlotool.problem.interface import AbstractHypergradient, LowerView, Vector


@target("hypergradient")
@dataclass(frozen=True)
class FirstOrder(AbstractHypergradient):
    """Takes `dtheta*_l = 0`: a solution is a constant, and only the direct gradient of the upper loss is left.

    Cost: nothing.

    Example:
        >>> FirstOrder().curvature
        'total'
    """

    can_push = True
    is_constant = True
    is_traceable = True

    def pullback(self, view: LowerView, inputs: Vector) -> None:
        """Take the current parameters for constants."""
        return

    def push(self, view: LowerView, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return zeros: it stays where it is."""
        return zeros(view.theta)
