"""A round of steps of all members, each by its own plan."""

from collections.abc import Sequence

from mlotool.fusion.comparison import Verdict
from mlotool.fusion.round_members import Outcome, RoundMembers
from mlotool.program import Program
from mlotool.program.traced_rounds import why_untraceable


class PlannedRound:
    """Takes a round of steps of the members of a stack one by one.

    Args:
        members: of the round.
        reason: why it is done one by one.

    Attributes:
        verdict: that reason.
    """

    def __init__(self, members: RoundMembers, reason: str) -> None:
        self._members = members
        self.verdict: Verdict | None = Verdict(is_fused=False, reason=reason)

    def __call__(self, live: Sequence[bool]) -> list[Outcome]:
        """Take the steps of the live members.

        Args:
            live: which members take part.
        """
        return self._members.each(live, self._members.drawing)

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self._members.drop(number)


def why_planned(names: Sequence[str], programs: Sequence[Program | None]) -> str:
    """Return why the gradients of a round cannot be taken as one program of all members; "" where nothing is known.

    Args:
        names: of the problems that step together.
        programs: those of the members; None has left.
    """
    for name in names:
        for program in filter(None, programs):
            reason = why_untraceable(program.engine.numbers[name], program.engine, is_fused=True)
            if reason is not None:
                return f"problems.{name}: {reason}"
    return ""
