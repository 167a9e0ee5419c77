"""What was found out about a round of steps of several members, and how it is said."""

from dataclasses import dataclass, replace
from typing import Any

DIFFERENT = (
    "problems.{problem}: found a gradient, as part of one program of several runs, that differs from that of this "
    "run's own plan by {difference:.1e} (relative) at tick {tick}; expected rounding. Its loss or a module has changed "
    "by what is no tensor (a counter, a file, a clock), which a trace fixes: gradients since tick {since} may be "
    "wrong, so the run ends. Let the loss depend on tensors alone, such as a buffer that counts, or write sweep.fuse=1."
)

CHANGED_LATER = (
    "Gradients as one program of several runs were wrong for some of them, which have ended: {error} Those of the "
    "others are right at tick {tick}, and are taken one by one from there on; whether they were from tick {since} on "
    "is not known."
)

CHANGED = "what a gradient depends on has changed by what is no tensor (a counter, a file, a clock)"

CHANGED_PLACE = "{place} has changed, which a trace has fixed"

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
        since_tick: how many ticks had been taken when it was decided.
        before: what held until then; None where nothing was known.
    """

    is_fused: bool
    fused_s: float | None = None
    alone_s: float | None = None
    reason: str = ""
    at_once: int | None = None
    since_tick: int = 0
    before: "Verdict | None" = None

    def at(self, tick: int) -> "Verdict":
        """Return what holds after so many ticks: runs that go on from an older checkpoint take those anew."""
        found = self
        while found.before is not None and tick < found.since_tick:
            found = found.before
        return found

    def changed(self, tick: int, **changes: Any) -> "Verdict":
        """Return what holds from a tick on, in the place of what held then; what was decided for later ones is dropped.

        Args:
            tick: how many ticks have been taken.
            changes: the fields that are others.
        """
        held = self.at(tick)
        return replace(held, **changes, since_tick=tick, before=held)
