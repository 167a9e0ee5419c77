"""Runs that share a process: each goes on by itself, but for its ticks, which are taken together."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenlet import greenlet

from mlotool.core.errors import Interrupted
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.program import Schedule
from mlotool.runner.process_settings import Interrupt
from mlotool.runner.random_state import random_state, restore_random_state
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
    error: Exception | None = None
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

    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Let the other runs go on until these ticks are taken."""
        self._company.wait(self._number, _Ask(schedule, count, keep, due_at))


class Company:
    """Several runs in one process.

    Each run is a coroutine that hands over where it would take its ticks, and gets them back when all that wait have
    taken theirs. What a run changes in the whole process, the global random numbers, is its own.

    Args:
        runs: what each run does, given its seat; what it returns or raises is its result.
        ticks: takes the ticks.
        shared: what runs share that are built from equal configs.
        when_ended: called with the number and the result of a run that has ended.
    """

    def __init__(
        self,
        runs: Mapping[int, Callable[[AbstractSeat], Any]],
        ticks: FusedTicks,
        shared: Any,
        when_ended: Callable[[int, Any], None],
    ) -> None:
        self.interrupt, self.shared = Interrupt(), shared
        self._ticks, self._when_ended = ticks, when_ended
        self._first = min(runs, default=0)
        self._coroutines = {number: greenlet(partial(run, Seat(self, number))) for number, run in runs.items()}
        self._asks: dict[int, _Ask] = {}
        self._random: dict[int, Any] = {}
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
            self._resume(waiting.pop(0))
            if not has_room():
                break
        self._ticks.leave_out(waiting)
        return waiting

    def run(self) -> None:
        """Let those that have begun run to their ends.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once all have ended.
        """
        while self._asks:
            self._advance()
            for number in [number for number, ask in self._asks.items() if ask.is_over]:
                del self._asks[number]
                self._resume(number)
        if self._interrupted is not None:
            raise self._interrupted
        if self.interrupt.requested:
            raise Interrupted(self.interrupt.exit_code)

    def wait(self, number: int, ask: _Ask) -> None:
        """Hand over to the other runs until a run's ticks are taken; for the run itself.

        Args:
            number: of the run.
            ask: what it waits for.
        """
        if ask.count <= 0:
            return
        assert self._conductor is not None
        self._ticks.join(number, ask.schedule)
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
        try:
            result = coroutine.switch()
        except KeyboardInterrupt as error:
            self._interrupted = self._interrupted or error
            self.interrupt.insist()
            result = error
        except BaseException as error:
            result = error
        # Lightning puts handlers of its own in their place, and takes them back.
        self.interrupt.listen()
        if coroutine.dead:
            self._ticks.leave(number)
            if not isinstance(result, KeyboardInterrupt):
                self._when_ended(number, result)

    def _advance(self) -> None:
        """Take ticks of the runs that are furthest behind, until one of them has what it wants."""
        asks = self._asks
        lowest = min(ask.schedule.num_ticks for ask in asks.values())
        behind = {number: ask for number, ask in asks.items() if ask.schedule.num_ticks == lowest}
        ahead = [ask.schedule.num_ticks for number, ask in asks.items() if number not in behind]
        count = min([ask.count for ask in behind.values()] + [tick - lowest for tick in ahead])
        due_at = min(ask.due_at for ask in behind.values())
        self._ticks.begin([*behind])
        self.interrupt.is_in_tick = True
        for _ in range(count):
            for number, outcome in self._ticks.tick([*behind]).items():
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
        now = time.monotonic()
        for ask in behind.values():
            ask.is_over = ask.count == 0 or now >= ask.due_at
        if self.interrupt.requested:
            for ask in asks.values():
                ask.is_over = True
