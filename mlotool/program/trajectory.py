"""What the last optimizer steps of a problem were taken from, so that they can be differentiated."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.replay import RandomState
from mlotool.program.update import Settings, State

Inputs = Mapping[str, Mapping[str, Tensor]]
"""By problem, tensors by parameter name."""


@dataclass(frozen=True)
class StepGraph:
    """The gradient of a step with its graph, where that is kept instead of being computed again.

    Args:
        theta: the parameters before the step, leaves.
        inputs: what shapes the problem, leaves in the order of `LowerLoss`.
        slopes: by batch, the gradient; zeros where a parameter is unused.
        mean: over batches and ranks; None where a parameter is unused.
    """

    theta: list[Tensor]
    inputs: list[Tensor]
    slopes: list[list[Tensor]]
    mean: list[Tensor | None]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        theta: the parameters before it, one tensor each.
        state: the optimizer's state before it, one a parameter.
        settings: the hyperparameters of the step, one mapping a parameter.
        draws: the batches of its gradient, each with the random state before its evaluation.
        readings: by lower problem that it read, that one's parameters at the time.
        graph: of its gradient, where that is kept.
    """

    theta: tuple[Tensor, ...]
    state: tuple[State, ...]
    settings: tuple[Settings, ...]
    draws: tuple[tuple[Any, RandomState], ...]
    readings: Inputs
    graph: StepGraph | None = None


class Trajectory:
    """The steps of an unroll, oldest first.

    Args:
        is_kept: whether anything is recorded.
        horizon: how many of the last steps are kept; None keeps all since `clear`.
    """

    def __init__(self, is_kept: bool = False, horizon: int | None = None) -> None:
        self.is_kept = is_kept
        self.num_taken = 0
        self._steps: deque[StepRecord] = deque(maxlen=horizon)

    @property
    def has_all(self) -> bool:
        """Whether the first step of the unroll is still there."""
        return self.num_taken == len(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._steps)

    def append(self, record: StepRecord) -> None:
        """Add the newest step."""
        self._steps.append(record)
        self.num_taken += 1

    def clear(self) -> None:
        """Forget them: what shapes the problem has moved on."""
        self._steps.clear()
        self.num_taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all but the batches, which a stream can fetch again."""
        steps = [
            {
                "theta": list(record.theta),
                "state": [dict(each) for each in record.state],
                "settings": [dict(each) for each in record.settings],
                "random": [random.state_dict() for _, random in record.draws],
                "readings": {name: dict(tensors) for name, tensors in record.readings.items()},
            }
            for record in self._steps
        ]
        return {"num_taken": self.num_taken, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any], batches: Sequence[Any]) -> None:
        """Take the state back.

        Args:
            state: what `state_dict` returned.
            batches: those of all the steps, oldest first.
        """
        self.clear()
        waiting = iter(batches)
        for each in state["steps"]:
            draws = tuple((next(waiting), RandomState.from_state_dict(random)) for random in each["random"])
            self.append(
                StepRecord(tuple(each["theta"]), tuple(each["state"]), tuple(each["settings"]), draws, each["readings"])
            )
        self.num_taken = state["num_taken"]


def copied(state: State) -> State:
    """Return a copy that the next step in place does not change."""
    return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
