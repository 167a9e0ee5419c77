"""What the graph needs to know of a problem. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProblemNode:
    """What validation needs to know of a problem.

    Args:
        roles: the problem's name by role of its loss.
        other_uses: problems that it uses outside its loss, by key: `reset_to`, `optimizer.lr`.
    """

    roles: Mapping[str, str]
    other_uses: Mapping[str, str] = field(default_factory=dict)
