"""What an evaluation reads beside the tensors that it is a function of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlotool.problem.trajectory import LowerSnapshots
from mlotool.program.loss_plan import Tensors, Values


@dataclass(frozen=True)
class Moment:
    """Batches and problems as they are, or as they are taken to be.

    Args:
        batches: by problem, batches that are given in the place of the streams' last ones.
        lower_snapshots: by problem, lower problems as they were at an earlier step.
        parameters: by number of the problem, constants in the place of its current parameters; None takes these.
    """

    batches: Mapping[str, Any] = field(default_factory=dict)
    lower_snapshots: LowerSnapshots = field(default_factory=dict)
    parameters: Sequence[Tensors] | None = None

    def values(self, num_problems: int) -> Values:
        """Return values of which every problem has its current ones, as constants."""
        return [None] * num_problems if self.parameters is None else list(self.parameters)


NOW = Moment()
"""All problems as they are, on their streams' last batches."""
