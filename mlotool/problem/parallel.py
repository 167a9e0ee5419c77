"""How a problem's own training step may evaluate its module: layer-parallel, in place of one serial pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.loss_output import LossOutput
from mlotool.problem.interface import AbstractHypergradient


class AbstractParallel(ABC):
    """A layer-parallel way to take the training steps of one problem.

    In the problem's own loss, in its own training steps, it stands in the module's place, for the roles that play
    this problem. Evaluation and hypergradients never see it: they run the module as one serial pass, at the
    parameters as they are.
    """

    @abstractmethod
    def attach(self, name: str, module: nn.Module) -> None:
        """Take the problem's module, whose parameters stay where they are; called once.

        Args:
            name: of the problem, for messages.
            module: of the problem.

        Raises:
            ConfigError: the module cannot be run in this way.
        """

    def check_data(self, dataset: Any) -> None:
        """Refuse data that it cannot be trained on; called once, after `attach`.

        Args:
            dataset: of the problem's stream; None where it has none of its own.

        Raises:
            ConfigError: it cannot.
        """

    def seed(self, seed: int) -> None:
        """Take a seed, before the first step; the first call counts.

        Where a recipe is built it has a seed of the recipe's, one for each problem. Each program that it is in calls
        this too, with the seed of its random numbers.
        """

    def default_hypergradient(self) -> AbstractHypergradient | None:
        """Return how gradients pass through the problem's solution where nothing else is set."""
        return None

    def to(self, device: torch.device) -> None:
        """Move what it keeps beside the module to a device; called before the first step."""

    @property
    def is_repeatable(self) -> bool:
        """Whether one step's gradient may be taken several times, as a line search does."""
        return True

    @property
    def is_divided(self) -> bool:
        """Whether a training step moves a part of the parameters on each rank, until `sync`."""
        return False

    def distribute(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Take part in a run of so many ranks; called before the first step, by all of them.

        Returns:
            Which part of the problem's batches this rank gets, and how many parts there are.

        Raises:
            ConfigError: it cannot be done with so many.
        """
        return rank, num_ranks

    def before_step(self) -> None:
        """Called before each optimizer step, which changes the parameters that this rank has a gradient for."""

    def sync(self, optimizer: Optimizer | None) -> None:
        """Give all ranks the parameters and buffers of those that move them; called by all.

        Args:
            optimizer: of the problem, whose state is given as well; None leaves it where it is.
        """

    def agree_on_buffers(self) -> None:
        """Average the floating-point buffers over the ranks that move the same ones; called by all if `is_divided`."""

    def begin(self, batch: Any, weight: float) -> None:
        """See the batch of the training step that follows.

        Args:
            batch: of the step; this rank's part.
            weight: of its loss among the ranks' (`problem/streams/batches.py`); 1 for an equal share.
        """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the module's place, in train mode and with its own parameters."""

    def evaluate(self, loss: Callable[[], LossOutput]) -> LossOutput:
        """Return the loss of a training step, the same numbers on all ranks that take it together.

        Args:
            loss: evaluates it, and calls this object in the module's place. A rank that has only the first part of the
                module leaves it there, and returns what the rank with the last part has found.
        """
        return loss()

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return what the problem steps along, and move its own state (auxiliary variables, ...).

        Args:
            loss: 0-D, of the step, with its graph.
            theta: the problem's parameters.

        Returns:
            One tensor per parameter; None where it is not this rank's, or unused. If `is_divided` they are means over
            the ranks that have the same parameters, else the caller averages them over all ranks.
        """
        return torch.autograd.grad(loss, list(theta), allow_unused=True)

    def statistics(self) -> Mapping[str, float]:
        """Return what to log of the last step, by name."""
        return {}

    def timeline(self) -> dict[str, Any] | None:
        """Return what ran when on which rank, to be drawn; None where nothing was recorded; called by all ranks."""
        return None

    def forecast(self) -> Sequence[str]:
        """Return what speed is to be expected, in sentences, after some training steps."""
        return ()

    @property
    def differs_by_rank(self) -> bool:
        """Whether each rank has a state of its own, which a checkpoint then keeps by rank."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-identical resume needs; plain containers and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back."""
