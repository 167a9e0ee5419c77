"""A round of steps of all members, each by its own plan."""

from collections.abc import Callable, Sequence

from mlotool.fusion.stack import Stack
from mlotool.fusion.verdict import Verdict
from mlotool.program import Program, Schedule
from mlotool.program.step_result import StepResult
from mlotool.program.untraceable import why_untraceable

Outcome = dict[str, StepResult] | Exception | None
"""What the steps of one member have given, or the error of one; None of a member that takes no part."""


class PlannedRound:
    """Takes a round of steps of the members of a stack one by one.

    Args:
        names: of the problems that step together.
        schedules: those of the members; None has left.
        stack: their tensors.
        reason: why it is done one by one; "" where nothing is said of that.

    Attributes:
        schedules: those of the members; None has left.
        verdict: that reason.
    """

    def __init__(
        self, names: tuple[str, ...], schedules: Sequence[Schedule | None], stack: Stack, reason: str = ""
    ) -> None:
        self.schedules = list(schedules)
        self._names, self._stack = names, stack
        self.verdict: Verdict | None = Verdict(is_fused=False, reason=reason)

    def __call__(self, live: Sequence[bool]) -> list[Outcome]:
        """Take the steps of the live members.

        Args:
            live: which members take part.
        """
        return self.each(live, lambda number: self.schedule(number).step_round(self._names))

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self.schedules[number] = None

    def schedule(self, number: int) -> Schedule:
        """Return the schedule of a member that is there."""
        found = self.schedules[number]
        assert found is not None
        return found

    def each(self, live: Sequence[bool], take: Callable[[int], dict[str, StepResult]]) -> list[Outcome]:
        """Return what each live member's steps give, or its own error.

        Args:
            live: which members take part.
            take: takes the steps of one.
        """
        outcomes: list[Outcome] = [None] * len(live)
        for number, is_live in enumerate(live):
            if not is_live:
                continue
            try:
                with self.schedule(number).program.random:
                    outcomes[number] = take(number)
                self._stack.refresh_member(number)
            except Exception as error:
                outcomes[number] = error
        return outcomes


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
