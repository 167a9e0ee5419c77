"""What a product is: `H u`, `M d` and `M^T q` of a lower loss, without a graph in their results.

H is the derivative of the stationarity `F = dC_l/dtheta` with respect to theta, M the one with respect to the
inputs of theta*_l.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from mlotool.problem.interface import Vector


class AbstractProduct(ABC):
    """Products at one point, on one batch, with one set of random numbers.

    Args:
        view: the loss.
        theta: the point, one tensor a parameter.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
    """

    @abstractmethod
    def hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`, one tensor a parameter."""

    @abstractmethod
    def push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`, one tensor a parameter, for one direction a wanted input."""

    @abstractmethod
    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`, one tensor a wanted input; the last call."""
