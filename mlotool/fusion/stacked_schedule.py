"""Ticks of several programs of equal structure, in lockstep."""

from collections.abc import Mapping, Sequence

from mlotool.fusion.errors import NotFusedError
from mlotool.fusion.feed import NotJointError, joint_streams
from mlotool.fusion.own_values import own_values
from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_rounds import Outcome, StackedRound, add_outcome
from mlotool.fusion.verdict import Verdict
from mlotool.program import Schedule


class StackedSchedule:
    """Takes the ticks of the members of a stack.

    Each member's schedule counts its ticks, its problems take their own steps, and its streams go on as they would
    alone; their gradients are taken by one program where that gains.

    Args:
        schedules: those of the members; None has left, and keeps its place.
        verdicts: by round (the names of its problems, joined by "+"), what was found out before.
        shares: by problem, whether all members have the same samples, as `JointStream.shares`; None finds it out.

    Raises:
        NotFusedError: the members differ in structure; nothing has changed.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule | None],
        verdicts: Mapping[str, Verdict] | None = None,
        shares: Mapping[str, bool] | None = None,
    ) -> None:
        self.schedules = list(schedules)
        programs = [None if schedule is None else schedule.program for schedule in schedules]
        names = [tuple(program.problems) for program in programs if program is not None]
        if len(set(names)) > 1:
            raise NotFusedError("they have different problems")
        self._own = own_values(programs)
        streams = {
            name: [None if program is None else program.problems[name].stream for program in programs]
            for name in names[0]
        }
        try:
            known = shares if shares is not None and shares.keys() >= streams.keys() else None
            self._streams = joint_streams(streams, shares=known)
        except NotJointError as error:
            raise NotFusedError(str(error)) from error
        self._stack = Stack(programs)
        self._verdicts = dict(verdicts or {})
        self._rounds: dict[tuple[str, ...], StackedRound] = {}

    @property
    def shares(self) -> dict[str, bool]:
        """By problem, whether all members have the same samples."""
        return {name: stream.shares for name, stream in self._streams.items()}

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By round, whether its gradients are taken as one program."""
        found = {"+".join(names): each.verdict for names, each in self._rounds.items()}
        return {**self._verdicts, **{name: verdict for name, verdict in found.items() if verdict is not None}}

    @property
    def reason(self) -> str:
        """Why its members cannot be a stack any more; "" where they can."""
        return self._stack.reason

    def refresh(self) -> None:
        """Look whether members have put other tensors in the place of theirs, before some ticks."""
        self._stack.refresh()

    def drop(self, schedule: Schedule | None) -> None:
        """Forget a member that has left; its lane stays."""
        for number, each in enumerate(self.schedules):
            if each is schedule and each is not None:
                self.schedules[number] = None
                self._stack.drop(number)
                for found in self._rounds.values():
                    found.drop(number)

    def tick(self, live: Sequence[bool]) -> list[Outcome]:
        """Take one tick of the live members, which stand at the same one.

        Args:
            live: which members take part.

        Returns:
            By member the results of the problems that have stepped, by name; or its error, after which it takes part
            no more; None of one that took no part.
        """
        outcomes: list[Outcome] = [{} if is_live else None for is_live in live]
        there = [(number, schedule) for number, schedule in enumerate(self.schedules) if live[number] and schedule]
        order = there[0][1].order()
        for names in order.rounds:
            for _, schedule in there:
                schedule.begin_round(names)
            found = self._round(names)([isinstance(each, dict) for each in outcomes])
            for number, schedule in there:
                add_outcome(outcomes, number, found[number])
                if isinstance(outcomes[number], dict):
                    add_outcome(outcomes, number, schedule.end_round(names))
            there = [each for each in there if isinstance(outcomes[each[0]], dict)]
            if not there:
                return outcomes
        for _, schedule in there:
            schedule.end_tick(order)
        return outcomes

    def _round(self, names: tuple[str, ...]) -> StackedRound:
        if names not in self._rounds:
            verdict = self._verdicts.get("+".join(names))
            self._rounds[names] = StackedRound(names, self.schedules, self._stack, self._own, self._streams, verdict)
        return self._rounds[names]
