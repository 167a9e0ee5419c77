"""What was found out about a round of steps of several members, and how it is said."""

from dataclasses import dataclass

DIFFERENT = (
    "problems.{problem}: the gradient of run {number} of a group of fused runs differs from that of its own plan by "
    "{difference:.1e} (relative); expected rounding. What a loss or a module keeps in Python (a counter, a rate that "
    "changes) is fixed by a trace. Keep it in a buffer, or write sweep.fuse=1."
)

UNLIKE = (
    "the gradient of problems.{problem} is another function in other runs ({difference:.1e} apart, relative): what a "
    "loss or a module holds that is no tensor differs by run, or changes"
)

UNTRUE = (
    "the gradient of problems.{problem} as one program differs from that of a run's own plan by {difference:.1e} "
    "(relative)"
)


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients of a round are taken as one program.

    Args:
        is_fused: whether they are.
        fused_s: seconds of a round of all members, their gradients as one program; None where that was not measured.
        alone_s: seconds of it with their gradients one by one.
        reason: why they are taken one by one; "" where they are not.
        at_once: how many members' gradients one program takes, where those of all did not fit into memory.
    """

    is_fused: bool
    fused_s: float | None = None
    alone_s: float | None = None
    reason: str = ""
    at_once: int | None = None
