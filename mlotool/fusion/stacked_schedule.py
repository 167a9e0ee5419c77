"""Ticks of several programs of equal structure, in lockstep."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mlotool.fusion.errors import NotFusedError
from mlotool.fusion.feed import NotJointError, joint_streams
from mlotool.fusion.layout import Layout
from mlotool.fusion.own_values import own_values
from mlotool.fusion.planned_rounds import PlannedRound, why_planned
from mlotool.fusion.round_members import Outcome, RoundMembers, add_outcome
from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_rounds import StackedRound
from mlotool.fusion.verdict import CHANGED_PLACE, Verdict
from mlotool.program import Schedule
from mlotool.program.guard import Guard, may_change_between_ticks
from mlotool.program.step_result import StepResult


class StackedSchedule:
    """Takes the ticks of the members of a stack.

    Each member's schedule counts its ticks, its problems take their own steps, and its streams go on as they would
    alone; their gradients are taken by one program where that gains.

    Args:
        schedules: those of the members; None has left, and keeps its place.
        verdicts: by round (the names of its problems, joined by "+"), what was found out before.
        layout: what the program of these lanes was made for, where a sweep is gone on with; None finds it out.

    Raises:
        NotFusedError: the members differ in structure; nothing has changed.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule | None],
        verdicts: Mapping[str, Verdict] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.schedules = list(schedules)
        programs = [None if schedule is None else schedule.program for schedule in schedules]
        names = [tuple(program.problems) for program in programs if program is not None]
        if len(set(names)) > 1:
            raise NotFusedError("they have different problems")
        self._own = own_values(programs, () if layout is None else layout.own_values)
        streams = {
            name: [None if program is None else program.problems[name].stream for program in programs]
            for name in names[0]
        }
        try:
            known = layout.shares if layout is not None and layout.shares.keys() >= streams.keys() else None
            self._streams = joint_streams(streams, shares=known)
        except NotJointError as error:
            raise NotFusedError(str(error)) from error
        self._stack = Stack(programs)
        self._courses: dict[str, dict[str, tuple[bool, ...]]] = {}
        for name, course in ({} if layout is None else layout.courses).items():
            problems, _, kind = name.rpartition(":")
            self._courses.setdefault(problems, {})[kind] = course
        self._verdicts = dict(verdicts or {})
        self._rounds: dict[tuple[str, ...], StackedRound | PlannedRound] = {}
        self._held, self._looked_at = "", -1
        self._may_change = any(
            may_change_between_ticks(problem)
            for program in programs
            if program is not None
            for problem in program.engine.problems
        )
        self._guard = Guard([[] if each is None else each.engine.problems for each in programs], with_modes=True)

    @property
    def layout(self) -> Layout:
        """What its program was made for."""
        return Layout(
            {name: stream.shares for name, stream in self._streams.items()},
            tuple(each.key for each in self._own),
            {f"{names}:{kind}": course for names, each in self._courses.items() for kind, course in each.items()},
        )

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
        self._stack.changes += 1
        self._stack.refresh()

    def drop(self, schedule: Schedule | None) -> None:
        """Forget a member that has left; its lane stays."""
        for number, each in enumerate(self.schedules):
            if each is schedule and each is not None:
                self.schedules[number] = None
                self._stack.drop(number)
                self._guard.drop(number)
                for found in self._rounds.values():
                    found.drop(number)

    def tick(self, live: Sequence[bool], *, may_have_changed: bool = True) -> list[Outcome]:
        """Take one tick of the live members, which stand at the same one.

        Args:
            live: which members take part.
            may_have_changed: whether anybody's code may have run since the last tick.

        Returns:
            By member the results of the problems that have stepped, by name; or its error, after which it takes part
            no more; None of one that took no part.
        """
        self._stack.changes += may_have_changed
        outcomes: list[Outcome] = [{} if is_live else None for is_live in live]
        there = {number: each for number, each in enumerate(self.schedules) if live[number] and each is not None}
        order = next(iter(there.values())).order()
        for names in order.rounds:
            for number, schedule in there.items():
                _try(outcomes, number, partial(schedule.begin_round, names))
            # The steps of the round before may have run somebody's code, too.
            self._stack.changes += self._may_change
            self._look()
            self._stack.refresh()
            round_of = self._round(names)
            live = [isinstance(each, dict) for each in outcomes]
            for number, found in enumerate(round_of(live) if any(live) else ()):
                if live[number]:
                    add_outcome(outcomes, number, found)
            for number, schedule in there.items():
                if _try(outcomes, number, partial(schedule.end_round, names)):
                    # A step that is taken back moves as any other.
                    self._stack.changes += 1
                    self._stack.refresh_member(number)
            for number, schedule in there.items():
                if not isinstance(outcomes[number], dict):
                    # It goes no further; until it has ended, its tensors are no part of the stack.
                    self.drop(schedule)
            there = {number: each for number, each in there.items() if isinstance(outcomes[number], dict)}
            if not there:
                return outcomes
        for schedule in there.values():
            schedule.end_tick(order)
        return outcomes

    def _look(self) -> None:
        """Look whether there are hooks, or losses and modules are others than they were; once is for good."""
        if self._held or self._looked_at == self._stack.changes:
            return
        self._looked_at = self._stack.changes
        if hook := self._guard.hook():
            self._held = f"{hook}, which one program of several runs does not call"
        elif change := self._guard.change():
            self._held = CHANGED_PLACE.format(place=change)

    def _why_apart(self) -> str:
        return self._held

    def _round(self, names: tuple[str, ...]) -> StackedRound | PlannedRound:
        if names not in self._rounds:
            members = RoundMembers(names, self.schedules, self._stack)
            reason = why_planned(names, [None if each is None else each.program for each in self.schedules])
            if reason:
                self._rounds[names] = PlannedRound(members, reason)
            else:
                name = "+".join(names)
                courses, verdict = self._courses.setdefault(name, {}), self._verdicts.get(name)
                self._rounds[names] = StackedRound(
                    members,
                    self._own,
                    self._streams,
                    courses,
                    verdict,
                    why_apart=self._why_apart,
                    renew=self._guard.settle,
                )
        return self._rounds[names]


def _try(outcomes: list[Outcome], number: int, call: Callable[[], Mapping[str, StepResult] | None]) -> bool:
    """Let a member that has no error yet do something, and add what it gives; return whether it gives something."""
    if not isinstance(outcomes[number], dict):
        return False
    try:
        found = call()
    except Exception as error:
        outcomes[number] = error
        return False
    add_outcome(outcomes, number, dict(found or {}))
    return bool(found)
