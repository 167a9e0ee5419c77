"""What an evaluation reads beside the tensors that it is a function of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlotool.program.loss_plan import Tensors, Values
from mlotool.program.trajectory import Readings


@dataclass(frozen=True)
class Moment:
    """Batches and problems as they are, or as they are taken to be.

    Args:
        batches: by problem, batches that are given in the place of the streams' last ones.
        readings: by problem, lower problems as they were at an earlier step.
        parameters: by number of the problem, constants in the place of its current parameters; None takes these.
    """

    batches: Mapping[str, Any] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict)
    parameters: Sequence[Tensors] | None = None

    def values(self, num_problems: int) -> Values:
        """Return values of which every problem has its current ones, as constants."""
        return [None] * num_problems if self.parameters is None else list(self.parameters)


NOW = Moment()
"""All problems as they are, on their streams' last batches."""
