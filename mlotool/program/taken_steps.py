"""The recorded steps of an unroll in plain containers, as a trace takes them for arguments."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mlotool.core.replay import RandomState
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.stream import SameBatch, Stream
from mlotool.problem.trajectory import LowerSnapshot, StepRecord

Place = tuple[str, int | None]
"""A hyperparameter by name, and its position in one that is a tuple."""


class TakenStep(NamedTuple):
    """One step, without random numbers and lower problems, of which it has none.

    Args:
        theta: the parameters before it.
        state: the optimizer's state before it, one mapping a parameter.
        batches: of its gradient.
        buffers: before each evaluation; empty where there are none.
        settings: hyperparameters, one mapping a parameter.
        numbers: those of them that are arguments, (n,) float64.
        places: by parameter, where among the numbers a hyperparameter stands.
    """

    theta: list[Tensor]
    state: list[dict[str, Tensor]]
    batches: list[Any]
    buffers: list[dict[str, Tensor | None]]
    settings: list[dict[str, Any]]
    numbers: Tensor
    places: list[dict[Place, int]]

    def record(self, devices: Sequence[Any]) -> StepRecord:
        """Return it as a record.

        Args:
            devices: CUDA devices of the problem.
        """
        # What draws random numbers is not traced: any state will do.
        random = RandomState(tuple(devices))
        hyperparameters = tuple(
            _with_numbers(settings, places, self.numbers)
            for settings, places in zip(self.settings, self.places, strict=True)
        )
        draws = tuple((batch, random) for batch in self.batches)
        return StepRecord(tuple(self.theta), tuple(self.state), hyperparameters, draws, {}, buffers=tuple(self.buffers))


class TakenSteps(NamedTuple):
    """The steps of an unroll, oldest first.

    Args:
        kind: what runs whose steps are one function share beside containers.
        has_all: whether the first of them is the first of its unroll.
        steps: the steps.
    """

    kind: str
    has_all: bool
    steps: list[TakenStep]

    def snapshot(
        self, theta: Sequence[Tensor], stream: Stream | SameBatch | None, devices: Sequence[Any]
    ) -> LowerSnapshot:
        """Return the problem as its reader finds it.

        Args:
            theta: its parameters now.
            stream: its own.
            devices: its CUDA devices.
        """
        return LowerSnapshot(theta, stream, tuple(step.record(devices) for step in self.steps), self.has_all)


def _with_numbers(settings: Mapping[str, Any], places: Mapping[Place, int], numbers: Tensor) -> Hyperparameters:
    found = dict(settings)
    for (name, position), number in places.items():
        if position is None:
            found[name] = numbers[number]
        else:
            found[name] = tuple(numbers[number] if i == position else each for i, each in enumerate(found[name]))
    return found
