"""What a program asks of an algorithm that estimates a gradient from values of the loss."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from mlotool.problem.interface import AbstractHypergradient, LowerView, Particle, Vector
from mlotool.problem.memory import Memory


class AbstractZerothOrder(AbstractHypergradient):
    """One that estimates the whole gradient of a problem above from values of its loss.

    No node carries it: the program hands it the loss as a function of the upper parameters, in which each solution
    below is a `rollout`.
    """

    @abstractmethod
    def rollout(self, view: LowerView, inputs: Vector) -> tuple[Tensor, ...]:
        """Return what theta*_l would have been for these inputs, without a graph.

        Args:
            view: of the problem.
            inputs: the tensors that theta*_l depends on.
        """

    @abstractmethod
    def gradient(
        self,
        loss: Callable[[Vector, Particle | None], Tensor],
        theta: Vector,
        memory: Memory,
        *,
        devices: tuple[torch.device, ...] = (),
        num_tasks: int | None = None,
        reader: str = "",
    ) -> list[Tensor]:
        """Return an estimate of the gradient of `loss` at `theta`.

        Args:
            loss: `(theta, particle) -> loss`, a 0-D tensor; with tasks one value a task, which depends on that one's
                part of theta alone. The particle goes to the rollouts.
            theta: parameters of a problem above, one tensor each.
            memory: of a problem below, the same at each gradient of the one above.
            devices: CUDA devices whose random numbers the loss draws.
            num_tasks: length of the leading task axis of theta; None without one.
            reader: the problem above: what is kept from one gradient to the next belongs to it.
        """
