"""Which batches and parameters an evaluation takes, where these are not the current ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlotool.problem.trajectory import LowerSnapshots
from mlotool.program.loss_plan import Tensors, Values


@dataclass(frozen=True)
class Moment:
    """What takes the place of current batches and parameters in an evaluation: at an earlier step, or as given.

    Args:
        batches: by problem, in the place of its stream's last batch.
        lower_snapshots: by problem, lower problems as they were at an earlier step.
        parameters: by number of the problem, constants in the place of its current parameters; None takes these.
    """

    batches: Mapping[str, Any] = field(default_factory=dict)
    lower_snapshots: LowerSnapshots = field(default_factory=dict)
    parameters: Sequence[Tensors] | None = None

    def values(self, num_problems: int) -> Values:
        """Return one entry a problem: its tensors here, or None for its current parameters; constants both."""
        return [None] * num_problems if self.parameters is None else list(self.parameters)


NOW = Moment()
"""The current parameters of all problems, and the last batches of their streams."""
