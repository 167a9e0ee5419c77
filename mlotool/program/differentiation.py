"""What a program asks of a hypergradient algorithm, and what it hands to one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.program.trajectory import Inputs, StepRecord
from mlotool.program.update import Settings, State

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
        unroll: the optimizer steps that led to theta, for algorithms that see steps; else None.
        num_tasks: length of the parameters' leading task axis; the loss is a sum over tasks that share none of their
            parameters. None without one.
        module: the problem's module.
        batch: on which the loss is evaluated.
        optimizer_step: `(theta, gradient) -> theta`: the step that the problem's optimizer would take next, pure and
            differentiable; raises ConfigError for an optimizer without a pure form.
        has_linear_step: whether that step is linear in the gradient.
        reader: the problem whose total gradient it is evaluated for: what an algorithm keeps from one pullback to the
            next belongs to the cotangents of one reader.
        batch_number: the batch's position in the stream, where every epoch has the same batches; else None.
        weight: of this rank's batch in the mean over ranks; the loss has it already.
    """

    problem: str
    theta: tuple[Tensor, ...]
    function: Callable[[Vector, Vector], Tensor]
    is_nested: bool = False
    reduce: Reduce = identity_reduce
    unroll: "Unroll | None" = None
    num_tasks: int | None = None
    module: nn.Module | None = None
    batch: Any = None
    optimizer_step: Callable[[Vector, Vector], list[Tensor]] | None = None
    has_linear_step: bool = False
    reader: str = ""
    batch_number: int | None = None
    weight: float = 1.0

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        """Return the loss at `theta`."""
        return self.function(theta, inputs)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices it runs on."""
        return tuple({tensor.device for tensor in self.theta if tensor.is_cuda})


@dataclass(frozen=True)
class Unroll:
    """Optimizer steps of a lower problem as functions of what shapes them.

    Args:
        records: the steps that were taken, oldest first; empty where they are to be simulated.
        has_all: whether the first of the records is the first step of the unroll.
        batches: by step, those to simulate with.
        loss: `(theta, inputs, batch, readings) -> loss`; `readings` replace lower solutions that have moved on.
        step: `(theta, gradient, state, settings, inputs) -> (theta, state)`: a pure step of the problem's optimizer,
            differentiable in all but the settings; gradients of unused parameters are None.
        start: `inputs -> theta` where the problem starts from the parameters of another one; else None.
        begin: `() -> (theta, state)`: where a simulation begins otherwise.
        settings: `count -> those of the next count steps`, schedules included; one mapping a parameter.
    """

    records: tuple[StepRecord, ...]
    has_all: bool
    batches: tuple[Any, ...]
    loss: Callable[[Vector, Vector, Any, Inputs], Tensor]
    step: Callable[
        [Vector, Sequence[Tensor | None], Sequence[State], Sequence[Settings], Vector],
        tuple[list[Tensor], list[State]],
    ]
    start: Callable[[Vector], Vector] | None
    begin: Callable[[], tuple[Vector, Sequence[State]]]
    settings: Callable[[int], list[tuple[Settings, ...]]]


class AbstractHypergradient(ABC):
    """How gradients pass through a problem's solution.

    Attributes:
        curvature: whether the stationarity is that of the "total" or the "partial" gradient.
        batch: at which batch the pullback is taken, the "last" or a "fresh" one.
        sees_steps: whether it differentiates the optimizer's steps, and so what shapes their start or their rate.
        horizon: of the steps that it sees, how many of the last ones; None sees all since a problem above stepped.
        keeps_graphs: whether the graphs of the recorded steps' gradients are kept.
    """

    curvature: str = "total"
    batch: str = "last"
    sees_steps: bool = False
    keeps_graphs: bool = False
    horizon: int | None = None

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

    def check_batches(self, problem: str, stream: Any, num_draws: int) -> None:
        """Refuse a stream of batches that the algorithm cannot do with.

        Args:
            problem: the problem whose solution it differentiates.
            stream: that one's; None where it has no batches.
            num_draws: batches it draws from one pullback to the next.

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


class AbstractZerothOrder(AbstractHypergradient):
    """One that estimates the whole gradient of a problem above from values of its loss.

    No node carries it: the program hands it the loss as a function of the upper parameters, in which each solution
    below is a `rollout`.
    """

    @abstractmethod
    def rollout(self, lower_loss: LowerLoss, inputs: Vector) -> tuple[Tensor, ...]:
        """Return what theta*_l would have been for these inputs, without a graph.

        Args:
            lower_loss: the problem's loss.
            inputs: the tensors that theta*_l depends on.
        """

    @abstractmethod
    def gradient(
        self, loss: Callable[[Vector], Tensor], theta: Vector, devices: tuple[torch.device, ...] = ()
    ) -> list[Tensor]:
        """Return an estimate of the gradient of `loss` at `theta`.

        Args:
            loss: `theta -> loss`, a 0-D tensor.
            theta: parameters of a problem above, one tensor each.
            devices: CUDA devices whose random numbers the loss draws.
        """
