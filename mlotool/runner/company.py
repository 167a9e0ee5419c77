"""Runs that share a process: each goes on by itself, but for its ticks, which are taken together."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
from greenlet import greenlet

from mlotool.core.errors import Interrupted
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.program import Schedule
from mlotool.runner.process_settings import Interrupt
from mlotool.runner.random_state import global_state, random_state, restore_global_state, restore_random_state
from mlotool.runner.seat import AbstractSeat, Keep


@dataclass(slots=True)
class _Ask:
    """What a run waits for.

    Args:
        schedule: whose ticks.
        count: how many it wants yet.
        keep: takes the results of each.
        due_at: when its checkpoint is due.
        error: that one of its ticks has raised.
        is_over: whether the run goes on with what it has.
    """

    schedule: Schedule
    count: int
    keep: Keep
    due_at: float
    error: BaseException | None = None
    is_over: bool = False


class Seat(AbstractSeat):
    """The place of one run.

    Args:
        company: all runs.
        number: of this one.
    """

    def __init__(self, company: "Company", number: int) -> None:
        self.interrupt, self.shared = company.interrupt, company.shared
        self.is_first = company.is_first(number)
        self._company, self._number = company, number

    def clock(self) -> float:
        """Return the seconds that this run has taken, with its share of the ticks of all."""
        return self._company.seconds(self._number)

    def join(self, schedule: Schedule) -> None:
        """Take the place that a run has had before, or a new one."""
        self._company.join(self._number, schedule)

    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Let the other runs go on until these ticks are taken."""
        self._company.wait(self._number, _Ask(schedule, count, keep, due_at))


class Company:
    """Several runs in one process.

    Each run is a coroutine that hands over where it would take its ticks, and gets them back when all that wait have
    taken theirs. What a run changes in the whole process, the global random numbers, is its own.

    Args:
        runs: what each run does, given its seat; what it returns or raises is its result.
        shared: what runs share that are built from equal configs.
        when_ended: called with the number and the result of a run that has ended.

    Attributes:
        ticks: takes the ticks; to be set before the runs begin.
    """

    def __init__(
        self,
        runs: Mapping[int, Callable[[AbstractSeat], Any]],
        shared: Any,
        when_ended: Callable[[int, Any], None],
    ) -> None:
        self.interrupt, self.shared = Interrupt(), shared
        self._when_ended = when_ended
        self.ticks: FusedTicks
        self._first = min(runs, default=0)
        self._coroutines = {number: greenlet(partial(run, Seat(self, number))) for number, run in runs.items()}
        self._asks: dict[int, _Ask] = {}
        # Those that had taken ticks in an earlier process.
        self._began: set[int] = set()
        self._random: dict[int, Any] = {}
        # Seconds of each run until now, or until it was let go on, and when that was.
        self._clocks: dict[int, float] = dict.fromkeys(runs, 0.0)
        self._current: tuple[int, float] | None = None
        self._conductor: greenlet | None = None
        self._interrupted: KeyboardInterrupt | None = None

    def is_first(self, number: int) -> bool:
        """Say whether a run is the first one to begin."""
        return number == self._first

    def begin(self, has_room: Callable[[], bool]) -> list[int]:
        """Let the runs begin, until each waits for its ticks; return the numbers of those that found no room.

        Args:
            has_room: asked after each run, whether the next one fits as well.
        """
        self._conductor = greenlet.getcurrent()
        waiting = list(self._coroutines)
        while waiting and not self.interrupt.requested:
            number = waiting.pop(0)
            self._resume(number)
            if number not in self._asks and number not in self._began:
                # It has ended before its first tick, in this process and before.
                self.ticks.leave_out([number])
            if not has_room():
                break
        self.ticks.leave_out(waiting)
        return waiting

    def has_place(self, number: int) -> bool:
        """Say whether a run waits for its ticks, or has taken some in an earlier process."""
        return number in self._asks or number in self._began

    def run(self) -> None:
        """Let those that have begun run to their ends.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once all have ended.
        """
        while self._asks:
            try:
                self._advance()
            except BaseException as error:
                # Each run ends in its own way, with its checkpoint and summary.
                for ask in self._asks.values():
                    ask.error, ask.is_over = error, True
            for number in [number for number, ask in self._asks.items() if ask.is_over]:
                del self._asks[number]
                self._resume(number)
        if self._interrupted is not None:
            raise self._interrupted
        if self.interrupt.requested:
            raise Interrupted(self.interrupt.exit_code)

    def seconds(self, number: int) -> float:
        """Return the seconds that a run has taken: its own, and its share of what was done for all that waited."""
        own = self._clocks.get(number, 0.0)
        if self._current is not None and self._current[0] == number:
            own += time.perf_counter() - self._current[1]
        return own

    @contextmanager
    def world(self, number: int) -> Iterator[Callable[[], bool]]:
        """Let numpy's and Python's global random numbers be those of a run that waits; yield whether it has drawn."""
        outside = numpy.random.get_state(), random.getstate()
        own = self._random[number]
        restore_global_state(own)
        begin = numpy.random.get_state(), random.getstate()
        try:
            yield lambda: not _are_equal(begin, (numpy.random.get_state(), random.getstate()))
        finally:
            own.update(global_state())
            numpy.random.set_state(outside[0])
            random.setstate(outside[1])

    def join(self, number: int, schedule: Schedule) -> None:
        """Let a run take its place; for the run itself, once it knows how far it is."""
        if schedule.num_ticks > 0:
            self._began.add(number)
            self.ticks.join(number, schedule)

    def wait(self, number: int, ask: _Ask) -> None:
        """Hand over to the other runs until a run's ticks are taken; for the run itself.

        Args:
            number: of the run.
            ask: what it waits for.
        """
        if ask.count <= 0:
            return
        assert self._conductor is not None
        self.ticks.join(number, ask.schedule)
        self._asks[number] = ask
        self._random[number] = random_state()
        self._conductor.switch()
        restore_random_state(self._random.pop(number))
        if ask.error is not None:
            raise ask.error

    def _resume(self, number: int) -> None:
        """Let a run go on until it waits again or ends."""
        coroutine = self._coroutines[number]
        result: Any
        self._current = number, time.perf_counter()
        try:
            result = coroutine.switch()
        except KeyboardInterrupt as error:
            self._interrupted = self._interrupted or error
            self.interrupt.insist()
            result = error
        except BaseException as error:
            result = error
        self._clocks[number], self._current = self.seconds(number), None
        # Lightning puts handlers of its own in their place, and takes them back.
        self.interrupt.listen()
        if coroutine.dead:
            self.ticks.leave(number)
            self._clocks.pop(number, None)
            if not isinstance(result, KeyboardInterrupt):
                self._when_ended(number, result)

    def _advance(self) -> None:
        """Take ticks of the runs that are furthest behind, until one of them has what it wants."""
        asks = self._asks
        if self.interrupt.requested:
            # It came while they began: some may not be there, without whom a tick would have other last bits.
            for ask in asks.values():
                ask.is_over = True
            return
        lowest = min(ask.schedule.num_ticks for ask in asks.values())
        behind = {number: ask for number, ask in asks.items() if ask.schedule.num_ticks == lowest}
        ahead = [ask.schedule.num_ticks for number, ask in asks.items() if number not in behind]
        count = min([ask.count for ask in behind.values()] + [tick - lowest for tick in ahead])
        due_at = min(ask.due_at for ask in behind.values())
        began, taking = time.perf_counter(), [*behind]
        self.ticks.begin(taking)
        self.interrupt.is_in_tick = True
        for number_of_tick in range(count):
            # Within these ticks no run goes on with anything else.
            found = self.ticks.tick([*behind], may_have_changed=number_of_tick == 0)
            for number, outcome in found.items():
                ask = behind[number]
                if isinstance(outcome, Exception):
                    ask.error, ask.is_over = outcome, True
                    del behind[number]
                elif outcome is not None:
                    ask.keep(outcome)
                    ask.count -= 1
            if not behind or self.interrupt.seen() or time.monotonic() >= due_at:
                break
        self.interrupt.is_in_tick = False
        share = (time.perf_counter() - began) / len(taking)
        for number in taking:
            self._clocks[number] += share
        now = time.monotonic()
        for ask in behind.values():
            ask.is_over = ask.count == 0 or now >= ask.due_at
        if self.interrupt.requested:
            for ask in asks.values():
                ask.is_over = True


def _are_equal(first: Any, second: Any) -> bool:
    (one, python), (other, other_python) = first, second
    return one[2] == other[2] and bool((one[1] == other[1]).all()) and python == other_python
