"""The control: no gradient through a solution."""

from dataclasses import dataclass

from torch import Tensor

from mlotool.program.differentiation import AbstractHypergradient, LowerLoss, Vector


@dataclass
class FirstOrder(AbstractHypergradient):
    """Takes `dtheta*_l = 0`: a solution is a constant, and only the direct gradient of the upper loss is left.

    Cost: nothing.

    Example:
        >>> FirstOrder().curvature
        'total'
    """

    def solution(self, lower_loss: LowerLoss, inputs: Vector) -> tuple[Tensor, ...]:
        """Return the current parameters as constants."""
        return lower_loss.theta
