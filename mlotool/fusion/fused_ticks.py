"""Ticks of several programs that share a process: those of equal structure as one, the others side by side."""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from mlotool.core.user_code import is_of_user
from mlotool.fusion.shared_batches import SideBySide
from mlotool.fusion.stack import reason_of
from mlotool.fusion.stacked_gradients import Outcome, Verdict
from mlotool.fusion.stacked_schedule import Layout, StackedSchedule
from mlotool.program import Schedule

# Numbers of mallopt's parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees for what it allocates next, where that is possible.

    The allocator of Linux (glibc) asks the system anew for each block above 32 MiB, and gives it back at once. Every
    page of it is then cleared and mapped when it is first written to, which takes up to five times as long as what an
    elementwise kernel does with it. Tensors of many runs in one are often so large.

    The process keeps its largest use of memory until it ends. Nothing happens with other allocators, and on a GPU
    torch has one of its own, which does the same.

    Source: man 3 mallopt.
    """
    with suppress(AttributeError, OSError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_MMAP_THRESHOLD, 2**30)
        set_option(_TRIM_THRESHOLD, 2**31 - 1)


def rows_at(tick: int, members: Sequence[int], ends: Mapping[int, int]) -> tuple[int, ...]:
    """Return which members of equal structure have a row in their stack in the tick after `tick`.

    A member that leaves keeps its row, which nobody reads any more, until at most half of the rows are in use; then
    those that are left get a stack of their own, from the second tick after its last one on: the first one it may have
    begun. So which rows there are at a tick depends on nothing but the ticks at which members have left: a sweep that
    was killed and goes on has the same, and computes the same bits.

    Args:
        tick: how many ticks have been taken.
        members: their numbers, in order.
        ends: by member that has left, its last tick; one that left before its first tick never had a row.

    Example:
        >>> rows_at(30, [0, 1, 2, 3], {1: 20, 3: 30}), rows_at(31, [0, 1, 2, 3], {1: 20, 3: 30})
        ((0, 1, 2, 3), (0, 2))
    """
    rows = tuple(members)
    for end in sorted({0, *ends.values()}):
        left = tuple(member for member in rows if ends.get(member, end + 1) > end)
        if end == 0 or (end < tick and 2 * len(left) <= len(rows)):
            rows = left
    return rows


World = Callable[[int], AbstractContextManager[Callable[[], bool]]]

_DRAWS = "a loss or the data use numpy's or Python's global random numbers, which fused runs would share"


@dataclass
class StackRecord:
    """Members of equal structure, and what was found out about them.

    Args:
        members: their numbers.
        verdicts: by round, the names of its problems joined by "+".
        reason: why they cannot be one program; "" where they can, or that is not known yet.
        since_tick: how many ticks had been taken when that was found out.
        layouts: by rows, what the program of those members was made for.
        ends: by member that has left, its last tick.
        stack: what takes their ticks together; None where that has not begun, or is over.
        rows: the members that have a row in it.
    """

    members: tuple[int, ...]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    reason: str = ""
    since_tick: int = 0
    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict, compare=False)
    stack: StackedSchedule | None = field(default=None, compare=False)
    rows: tuple[int, ...] = field(default=(), compare=False)

    def next_rows(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the members that have a row in the next tick of one of them, of which this is the schedule."""
        return rows_at(schedule.num_ticks, self.members, self.ends)

    def is_apart(self, schedule: Schedule) -> bool:
        """Return whether no round of these members is taken as one program from a member's next tick on.

        Of a run that goes on from an older checkpoint it is what was known at that tick: a step by a trace of its own
        has other last bits than one by its plan, which is what a stack takes where its program is no use.
        """
        tick = schedule.num_ticks
        if (self.reason and tick >= self.since_tick) or len(self.members) == 1:
            return True
        decided = {name for round_name in self.verdicts for name in round_name.split("+")}
        is_off = not any(verdict.is_fused or tick <= verdict.since_tick for verdict in self.verdicts.values())
        return is_off and decided >= schedule.program.problems.keys()


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
        alike: dict[str, list[int]] = {}
        for member, structure in structures.items():
            alike.setdefault(structure, []).append(member)
        known = {record.members: record for record in records}
        self.records = [known.get(tuple(members), StackRecord(tuple(members))) for members in alike.values()]
        for record in self.records:
            record.ends = {member: end for member, end in (ends or {}).items() if member in record.members}
            record.stack = None
        self._record_of = {member: record for record in self.records for member in record.members}
        self._schedules: dict[int, Schedule] = {}
        self._when_decided = when_decided
        self._beside = SideBySide()
        self._world = world
        # Those with code that may draw from global random numbers.
        self._foreign: set[int] = set()
        # Those whose last tick has raised, and that have not ended yet.
        self._failed: set[int] = set()
        self._is_told = False

    def join(self, member: int, schedule: Schedule) -> None:
        """Take in a member that waits for its first tick."""
        if member not in self._schedules and _has_foreign_code(schedule):
            self._foreign.add(member)
        self._schedules[member] = schedule

    def progress(self, member: int) -> int:
        """Return how many ticks a member has behind it."""
        return self._schedules[member].num_ticks if member in self._schedules else 0

    def leave_out(self, members: Iterable[int]) -> None:
        """Give members no row that do not begin now."""
        for member in members:
            record = self._record_of.pop(member)
            record.ends[member] = 0
            if not record.layouts:
                record.members = tuple(other for other in record.members if other != member)

    def leave(self, member: int) -> None:
        """Take note that a member has ended."""
        schedule = self._schedules.pop(member, None)
        self._failed.discard(member)
        record = self._record_of[member]
        record.ends[member] = 0 if schedule is None else schedule.num_ticks
        if record.stack is not None:
            record.stack.drop(schedule)

    def begin(self, members: Sequence[int]) -> None:
        """Set up some ticks: members may have put other tensors in the place of theirs since the last ones."""
        if not self._is_told:
            self._is_told = True
            for record in self.records:
                if len(record.members) == 1:
                    record.reason = "no other run of its group has a program of the same structure"
            self._when_decided(self.records)
        for record in self.records:
            if record.stack is not None and any(self._record_of[member] is record for member in members):
                record.stack.refresh()
        self._beside.take([schedule.program for member, schedule in self._schedules.items() if self._is_alone(member)])

    def tick(self, members: Sequence[int], *, may_have_changed: bool = True) -> dict[int, Outcome]:
        """Take one tick of members that stand at the same one.

        Args:
            members: their numbers.
            may_have_changed: whether anybody's code may have run since the last tick.

        Returns:
            By member the results of the problems that have stepped, by name, or its error.
        """
        outcomes: dict[int, Outcome] = {}
        for record in self.records:
            alike = [member for member in members if self._record_of[member] is record]
            if alike:
                stack = self._stack(record, self._schedules[alike[0]])
                if stack is None:
                    outcomes |= {member: self._alone(member) for member in alike}
                else:
                    outcomes |= self._together(record, stack, alike, may_have_changed)
        self._failed |= {member for member, outcome in outcomes.items() if isinstance(outcome, Exception)}
        return outcomes

    def _is_alone(self, member: int) -> bool:
        """Return whether a member takes its ticks by itself for good."""
        record, schedule = self._record_of[member], self._schedules[member]
        return record.is_apart(schedule) or len(record.next_rows(schedule)) < 2

    def _alone(self, member: int) -> Outcome:
        schedule = self._schedules[member]
        is_first = schedule.num_ticks == 0
        try:
            if self._world is None or not (is_first or member in self._foreign):
                return schedule.tick()
            with self._world(member) as has_drawn:
                results = schedule.tick()
                if is_first and has_drawn():
                    self._put_apart(self._record_of[member], _DRAWS, 0)
                return results
        except Exception as error:
            return error

    def _together(
        self, record: StackRecord, stack: StackedSchedule, members: Sequence[int], may_have_changed: bool
    ) -> dict[int, Outcome]:
        rows = record.rows
        try:
            there = [row for row, member in enumerate(rows) if member in members]
            outcomes = stack.tick(there, may_have_changed=may_have_changed)
        except Exception as error:
            # In the middle of a tick: none of them can go on, but other members can.
            return dict.fromkeys(members, error)
        if (stack.verdicts, stack.layout) != (record.verdicts, record.layouts.get(rows)):
            record.verdicts, record.layouts[rows] = stack.verdicts, stack.layout
            self._when_decided(self.records)
        return {rows[row]: outcome for row, outcome in outcomes.items()}

    def _stack(self, record: StackRecord, schedule: Schedule) -> StackedSchedule | None:
        """Return the stack of members of equal structure in the next tick of one of them; None: each is by itself."""
        tick, rows = schedule.num_ticks, record.next_rows(schedule)
        # The first steps are the optimizers' own.
        if tick == 0 or record.is_apart(schedule) or len(rows) < 2:
            return None
        if record.stack is None or record.rows != rows:
            there = [None if member in self._failed else self._schedules.get(member) for member in rows]
            try:
                record.stack = StackedSchedule(there, record.verdicts, record.layouts.get(rows))
                record.rows = rows
            except Exception as error:
                # Whatever it is, each can go on by itself.
                self._put_apart(record, reason_of(error), tick)
                return None
        elif record.stack.reason:
            self._put_apart(record, record.stack.reason, tick)
            return None
        return record.stack

    def _put_apart(self, record: StackRecord, reason: str, tick: int) -> None:
        """Let members take their ticks by themselves from this one on."""
        record.reason, record.since_tick = reason, tick
        self._when_decided(self.records)


def _has_foreign_code(schedule: Schedule) -> bool:
    problems = schedule.program.problems.values()
    parts = [part for owner in problems for part in (getattr(owner.loss, "func", owner.loss), *owner.submodules)]
    data = [getattr(owner.stream, "dataset", None) for owner in problems]
    data += [part for owner in problems for part in getattr(owner.stream, "code", ())]
    return is_of_user(*parts, *[part for part in data if part is not None])
