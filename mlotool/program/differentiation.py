"""What a program asks of a hypergradient algorithm, and what it hands to one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Vector = Sequence[Tensor]
"""One tensor a parameter: a point or a direction in a problem's parameter space."""

Reduce = Callable[[Vector], Vector]
"""A mean over ranks; the identity in one process."""


def identity_reduce(vector: Vector) -> Vector:
    """Return `vector`: the mean over one process."""
    return vector


@dataclass(frozen=True)
class LowerLoss:
    """The loss of a lower problem as a pure function, on one batch.

    Args:
        problem: the problem's name.
        theta: its current parameters, detached, one tensor each.
        function: `(theta, inputs) -> loss`, a 0-D tensor; `inputs` are the tensors of all problems that
            theta*_l depends on, in the order in which `AbstractHypergradient.solution` got them.
        is_nested: whether solutions of still lower problems are eliminated inside it.
        reduce: mean over ranks.
    """

    problem: str
    theta: tuple[Tensor, ...]
    function: Callable[[Vector, Vector], Tensor]
    is_nested: bool = False
    reduce: Reduce = identity_reduce

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        """Return the loss at `theta`."""
        return self.function(theta, inputs)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices it runs on."""
        return tuple({tensor.device for tensor in self.theta if tensor.is_cuda})


class AbstractHypergradient(ABC):
    """How gradients pass through a problem's solution."""

    curvature: str = "total"
    batch: str = "last"

    @abstractmethod
    def solution(self, lower_loss: LowerLoss, inputs: Vector) -> tuple[Tensor, ...]:
        """Return theta*_l as tensors with a backward of their own.

        Args:
            lower_loss: the problem's loss.
            inputs: the tensors that theta*_l depends on; gradients flow to those that require them.

        Returns:
            Tensors with the values of `lower_loss.theta`.
        """

    def check(self, problem: str, *, is_nested: bool, is_differentiated: bool) -> None:
        """Refuse by name what the algorithm cannot do in the graph at hand.

        Args:
            problem: the problem whose solution it differentiates.
            is_nested: the problem eliminates lower solutions inside its own stationarity.
            is_differentiated: a nested problem above needs the derivative of this pullback.

        Raises:
            ConfigError: it cannot.
        """

    def statistics(self) -> dict[str, float]:
        """Return numbers to log about the last pullback, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""
