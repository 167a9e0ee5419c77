"""Ticks of several programs that share a process: those of equal structure as one, the others side by side."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain

from mlotool.core.user_code import is_of_user
from mlotool.fusion.errors import reason_of
from mlotool.fusion.lanes import Lanes
from mlotool.fusion.layout import Layout
from mlotool.fusion.round_members import Outcome
from mlotool.fusion.side_by_side import SideBySide
from mlotool.fusion.stacked_schedule import StackedSchedule
from mlotool.fusion.verdict import Verdict
from mlotool.program import Schedule

World = Callable[[int], AbstractContextManager[Callable[[], bool]]]

_NUM_LOOKS = 2
_DRAWS = "a loss or the data draw from numpy's or Python's global random numbers, of which each run has its own"


@dataclass
class StackRecord:
    """What was found out about members of equal structure.

    Args:
        members: their numbers.
        verdicts: by round, the names of its problems joined by "+".
        reason: why they cannot be one program; "" where they can, or that is not known yet.
        since_tick: how many ticks had been taken when that was found out.
        layouts: by lanes, what the program of those members was made for.
    """

    members: tuple[int, ...]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    reason: str = ""
    since_tick: int = 0
    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)


class FusedTicks:
    """Takes the ticks of members.

    Args:
        structures: by member a text that is the same for members of equal structure.
        ends: by member that had left in an earlier process, its last tick.
        records: what was found out in an earlier process.
        when_decided: called when more has been found out.
        world: by member a context in which numpy's and Python's global random numbers are its own, and which yields a
            function that says whether it has drawn some.
    """

    def __init__(
        self,
        structures: Mapping[int, str],
        ends: Mapping[int, int] | None = None,
        records: Sequence[StackRecord] = (),
        when_decided: Callable[[Sequence[StackRecord]], None] = lambda records: None,
        world: World | None = None,
    ) -> None:
        classes: dict[str, list[int]] = {}
        for member, structure in structures.items():
            classes.setdefault(structure, []).append(member)
        known = {record.members: record for record in records}
        self.records = [known.get(tuple(members), StackRecord(tuple(members))) for members in classes.values()]
        self._lanes = [Lanes(record.members, ends or {}) for record in self.records]
        self._class_of = {member: number for number, record in enumerate(self.records) for member in record.members}
        self._stacks: dict[int, tuple[tuple[int, ...], StackedSchedule]] = {}
        self._schedules: dict[int, Schedule] = {}
        self._when_decided = when_decided
        self._beside = SideBySide()
        self._world = world
        # Those with code that may draw from global random numbers.
        self._foreign: set[int] = set()
        # By structure and problem, how often each member has read a batch by itself, to see whether its data draw some.
        self._num_looks: Counter[tuple[int, str]] = Counter()
        # Those whose last tick has raised, and that have not ended yet.
        self._failed: set[int] = set()
        self._is_told = False
        for record in self.records:
            self._look_at_size(record)

    def join(self, member: int, schedule: Schedule) -> None:
        """Take in a member that waits for its first tick."""
        if member not in self._schedules and _has_foreign_code(schedule):
            self._foreign.add(member)
        self._schedules[member] = schedule

    def leave_out(self, members: Iterable[int]) -> None:
        """Give members no lane that do not begin now."""
        for member in members:
            number = self._class_of.pop(member)
            self._lanes[number].leave(member, 0)
            record = self.records[number]
            if not record.layouts:
                record.members = tuple(each for each in record.members if each != member)
                self._look_at_size(record)

    def _look_at_size(self, record: StackRecord) -> None:
        if len(record.members) == 1:
            record.reason = "no other run of its group has a program of its structure"

    def leave(self, member: int) -> None:
        """Take note that a member has ended."""
        schedule = self._schedules.pop(member, None)
        if schedule is not None:
            self._beside.leave(schedule.program)
        self._failed.discard(member)
        number = self._class_of[member]
        self._lanes[number].leave(member, 0 if schedule is None else schedule.num_ticks)
        if number in self._stacks:
            self._stacks[number][1].drop(schedule)

    def begin(self, members: Sequence[int]) -> None:
        """Set up some ticks: members may have put other tensors in the place of theirs since the last ones."""
        if not self._is_told:
            self._is_told = True
            self._when_decided(self.records)
        for number in {self._class_of[member] for member in members} & self._stacks.keys():
            self._stacks[number][1].refresh()
        alone = [member for member in self._schedules if self._is_alone(member)]
        self._beside.take([self._schedules[member].program for member in alone])

    def tick(self, members: Sequence[int], *, may_have_changed: bool = True) -> dict[int, Outcome]:
        """Take one tick of members that stand at the same one.

        Args:
            members: their numbers.
            may_have_changed: whether anybody's code may have run since the last tick.

        Returns:
            By member the results of the problems that have stepped, by name, or its error.
        """
        outcomes: dict[int, Outcome] = {}
        by_class: dict[int, list[int]] = {}
        for member in members:
            by_class.setdefault(self._class_of[member], []).append(member)
        for number, found in by_class.items():
            self._look_at_data(number, found)
            stack = self._stack(number, self._schedules[found[0]].num_ticks)
            outcomes |= self._alone(found) if stack is None else self._together(number, *stack, found, may_have_changed)
        self._failed |= {member for member, outcome in outcomes.items() if isinstance(outcome, Exception)}
        return outcomes

    def _look_at_data(self, number: int, members: Sequence[int]) -> None:
        """Put members apart whose data draw from global random numbers: what is read together is in nobody's own.

        A batch may have been read before, so two of each problem are looked at. They are what comes next in any case.
        """
        schedule, record, any_has_drawn = self._schedules[members[0]], self.records[number], False
        foreign = [member for member in members if member in self._foreign]
        if self._world is None or not foreign or record.reason or schedule.num_ticks == 0:
            return
        for name in chain(*schedule.order().rounds):
            self._num_looks[number, name] += 1
            for member in foreign if self._num_looks[number, name] <= _NUM_LOOKS else ():
                stream = self._schedules[member].program.problems[name].stream
                # What cannot be read says so in the tick.
                with self._world(member) as has_drawn, suppress(Exception):
                    if stream is not None:
                        stream.peek()
                    any_has_drawn |= has_drawn()
        if any_has_drawn:
            self._put_apart(record, _DRAWS, schedule.num_ticks)

    def _is_alone(self, member: int) -> bool:
        """Return whether a member takes its ticks by itself for good."""
        number, tick = self._class_of[member], self._schedules[member].num_ticks
        return self._is_apart(number, tick) or len(self._lanes[number].at(tick)) < 2

    def _is_apart(self, number: int, tick: int) -> bool:
        """Return whether no round of members of equal structure is taken as one program after so many ticks.

        Of a run that goes on from an older checkpoint it is what was known at that tick: a step by a trace of its own
        has other last bits than one by its plan, which is what a stack takes where its program is no use.
        """
        record = self.records[number]
        if (record.reason and tick >= record.since_tick) or len(record.members) == 1:
            return True
        problems = {name for names in record.verdicts for name in names.split("+")}
        is_off = not any(each.is_fused or tick <= each.since_tick for each in record.verdicts.values())
        known = next((self._schedules[member] for member in record.members if member in self._schedules), None)
        return is_off and known is not None and problems >= known.program.problems.keys()

    def _alone(self, members: Sequence[int]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        for member in members:
            schedule = self._schedules[member]
            is_first = schedule.num_ticks == 0
            try:
                if self._world is None or not (is_first or member in self._foreign):
                    outcomes[member] = schedule.tick()
                    continue
                with self._world(member) as has_drawn:
                    outcomes[member] = schedule.tick()
                    if is_first and has_drawn():
                        self._put_apart(self.records[self._class_of[member]], _DRAWS, 0)
            except Exception as error:
                outcomes[member] = error
        return outcomes

    def _together(
        self,
        number: int,
        lanes: tuple[int, ...],
        stack: StackedSchedule,
        members: Sequence[int],
        may_have_changed: bool,
    ) -> dict[int, Outcome]:
        try:
            found = stack.tick([member in members for member in lanes], may_have_changed=may_have_changed)
        except Exception as error:
            # In the middle of a tick: none of them can go on, but other members can.
            return dict.fromkeys(members, error)
        record = self.records[number]
        if (stack.verdicts, stack.layout) != (record.verdicts, record.layouts.get(lanes)):
            record.verdicts, record.layouts[lanes] = stack.verdicts, stack.layout
            self._when_decided(self.records)
        return {member: outcome for member, outcome in zip(lanes, found, strict=True) if outcome is not None}

    def _stack(self, number: int, tick: int) -> tuple[tuple[int, ...], StackedSchedule] | None:
        """Return the stack of members of equal structure after `tick`, with its lanes; None where each is by itself."""
        record = self.records[number]
        # The first steps are the optimizers' own.
        if tick == 0 or self._is_apart(number, tick):
            return None
        lanes = self._lanes[number].at(tick)
        if len(lanes) < 2:
            return None
        if number not in self._stacks or self._stacks[number][0] != lanes:
            there = [None if member in self._failed else self._schedules.get(member) for member in lanes]
            try:
                stack = StackedSchedule(there, record.verdicts, record.layouts.get(lanes))
                self._stacks[number] = lanes, stack
            except Exception as error:
                # Whatever it is, each can go on by itself.
                self._put_apart(record, reason_of(error), tick)
                return None
        elif self._stacks[number][1].reason:
            self._put_apart(record, self._stacks[number][1].reason, tick)
            return None
        return self._stacks[number]

    def _put_apart(self, record: StackRecord, reason: str, tick: int) -> None:
        """Let members take their ticks by themselves from this one on."""
        record.reason, record.since_tick = reason, tick
        self._when_decided(self.records)


def _has_foreign_code(schedule: Schedule) -> bool:
    problems = schedule.program.problems.values()
    parts = [part for each in problems for part in (getattr(each.loss, "func", each.loss), *each.submodules)]
    data = [getattr(each.stream, "dataset", None) for each in problems]
    return is_of_user(*parts, *[each for each in data if each is not None])
