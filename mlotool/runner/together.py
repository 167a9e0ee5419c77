"""Several runs in one process, each of which leaves an ordinary run folder."""

import gc
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from greenlet import greenlet
from pydantic import TypeAdapter, ValidationError

from mlotool.config.sweep_plan import structure_of
from mlotool.config.user_data import SharedData
from mlotool.core.errors import Interrupted, RunFileError, WriteError
from mlotool.core.files import write_text, writing
from mlotool.core.messages import escape
from mlotool.core.process import terminable
from mlotool.core.run_files import read_json
from mlotool.distributed.collectives import Ranks
from mlotool.fusion.comparison import Tick, Verdict
from mlotool.fusion.fused_ticks import FusedTicks, StackRecord, keep_freed_memory
from mlotool.fusion.stacked_schedule import Layout
from mlotool.program import Schedule
from mlotool.runner.process_settings import (
    Interrupt,
    announcements,
    count_devices,
    find_device,
    quiet_lightning,
    torch_settings,
    untracked_past,
)
from mlotool.runner.random_state import global_state, random_state, restore_global_state, restore_random_state
from mlotool.runner.run_config import RunRequest, RunResult, run, run_here
from mlotool.runner.seat import AbstractSeat, Keep

RESERVE = 0.25
"""Share of the memory that stays free: for what evaluations and checkpoints take, and for other processes."""

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Limit and use of a container or a cluster's job, by the versions of control groups."""


class MemoryRoom:
    """Watches how much memory each run takes that begins.

    A run is expected to take as much as the largest one before it, and as much again while it trains: its gradients,
    and what is kept of its loss's evaluation.

    Args:
        device: where the runs compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest = 0
        self._free = self._look()

    def takes_one_more(self) -> bool:
        """Say, after a run has begun, whether one more is expected to fit; it is where nothing is known."""
        before, self._free = self._free, self._look()
        if before is None or self._free is None:
            return True
        free, total = self._free
        self._largest = max(self._largest, before[0] - free)
        return free - 2 * self._largest >= RESERVE * total

    def _look(self) -> tuple[int, int] | None:
        """Return the bytes that are free, and all."""
        if self._device.type == "cuda":
            gc.collect()
            free, total = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return free + unused, total
        try:
            lines = _MEMINFO.read_text().splitlines()
            found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
            free, total = found["MemAvailable"], found["MemTotal"]
        except (OSError, KeyError, ValueError, IndexError):
            return None
        for limit, use in _GROUPS:
            try:
                most, used = int(limit.read_text()), int(use.read_text())
            except (OSError, ValueError):
                # "max" is none.
                continue
            if most < total:
                free, total = min(free, most - used), most
        return free, total


@dataclass
class _Apart:
    """Why the runs of a stack are taken one by one, in a record's file, and since when."""

    reason: str = ""
    since_tick: Tick = 0


@dataclass
class _Lanes(Layout):
    """A layout in a record's file, with the jobs whose runs it is of."""

    jobs: list[int] = field(default_factory=list)


@dataclass
class _StackOfJobs:
    """A stack in a record's file."""

    jobs: list[int]
    rounds: dict[str, Verdict]
    apart: _Apart
    layouts: list[_Lanes]


@dataclass
class _Record:
    """A record's file, as far as it is read."""

    stacks: list[_StackOfJobs]
    waves: list[list[int]] = field(default_factory=list)


def read_record(path: Path, jobs: Sequence[int]) -> tuple[list[list[int]], list[StackRecord]]:
    """Return which runs began together, and what was found out about stacks of them, by numbers of runs.

    A file that is not as it was written is as good as none, with a warning: nothing in it could make a gradient wrong,
    but runs that share a program in another way than before have other last bits.

    Args:
        path: of the file.
        jobs: by number of the run, that of its job.
    """

    def numbers(found: Sequence[int]) -> list[int]:
        if not found or len(set(found)) < len(found) or not set(found) <= set(jobs):
            raise ValueError(f"jobs {str(found)[:80]}")
        return [jobs.index(job) for job in found]

    try:
        content = json.dumps(read_json(path.parent, path.name) or {"stacks": []})
        record = TypeAdapter(_Record).validate_json(content, strict=True)
        waves = [numbers(wave) for wave in record.waves]
        if len({number for wave in waves for number in wave}) < sum(map(len, waves)):
            raise ValueError(f"waves {str(record.waves)[:80]}")
        stacks = [
            StackRecord(
                tuple(numbers(stack.jobs)),
                stack.rounds,
                stack.apart.reason,
                stack.apart.since_tick,
                {
                    tuple(numbers(lanes.jobs)): Layout(lanes.shares, lanes.own_values, lanes.courses)
                    for lanes in stack.layouts
                },
            )
            for stack in record.stacks
        ]
    except (RunFileError, ValueError, RecursionError) as error:
        found = error.errors()[0] if isinstance(error, ValidationError) else None
        told = str(error) if found is None else f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
        warnings.warn(
            f"{path}: found {escape(' '.join(told.split())[:200])}; expected what an earlier process of these jobs "
            "wrote. What runs as one program is found out anew, so that last bits may be others than without it.",
            stacklevel=2,
        )
        return [], []
    return waves, stacks


class FusionRecord:
    """Keeps the record of a group of runs in a file.

    Args:
        path: of the file; None keeps none.
        jobs: by number of the run, that of its job.
    """

    def __init__(self, path: Path | None, jobs: Sequence[int]) -> None:
        self._path, self._jobs = path, list(jobs)
        self._stacks: dict[tuple[int, ...], StackRecord] = {}
        self._waves: list[list[int]] = []
        if path is not None and path.is_file():
            self._waves, stacks = read_record(path, self._jobs)
            self._stacks = {each.members: each for each in stacks}

    def stacks(self) -> list[StackRecord]:
        """Return what was found out before, by numbers of runs."""
        return list(self._stacks.values())

    def began_together(self, waiting: Sequence[int]) -> list[int]:
        """Return which of the runs that wait began together first, in an earlier process; none where none did."""
        found = [[number for number in wave if number in waiting] for wave in self._waves]
        return next((wave for wave in found if wave), [])

    def begin(self, members: Sequence[int]) -> None:
        """Write down which runs have begun together."""
        if [*members] not in self._waves:
            self._waves.append([*members])
        self.take([])

    def take(self, records: Sequence[StackRecord]) -> None:
        """Write down what has been found out."""
        self._stacks |= {each.members: each for each in records}
        if self._path is None:
            return
        known = [each for each in self._stacks.values() if each.reason or each.verdicts or each.layouts]
        waves = [[self._jobs[number] for number in wave] for wave in self._waves]
        content = {"jobs": self._jobs, "waves": waves, "stacks": [self._plain(each) for each in known]}
        try:
            with writing(self._path):
                self._path.parent.mkdir(exist_ok=True)
            write_text(self._path, json.dumps(content, indent=2) + "\n")
        except WriteError as error:
            # The runs themselves may still find room.
            warnings.warn(str(error), stacklevel=2)

    def note(self, members: Sequence[int], reason: str) -> None:
        """Write down why some runs are taken one by one."""
        self.take([StackRecord(tuple(members), reason=reason)])

    def _plain(self, record: StackRecord) -> dict[str, Any]:
        verdicts = list(record.verdicts.values())
        fused, alone = (_total(verdicts, name) for name in ("fused_s", "alone_s"))
        reasons = dict.fromkeys(filter(None, [record.reason, *[each.reason for each in verdicts]]))
        return {
            "jobs": [self._jobs[member] for member in record.members],
            "is_fused": any(each.is_fused for each in verdicts) and not record.reason,
            "until_tick": _until(record),
            "fused_s": fused,
            "alone_s": alone,
            "reason": "; ".join(reasons),
            "apart": {"reason": record.reason, "since_tick": record.since_tick},
            "layouts": [
                {"jobs": [self._jobs[member] for member in lanes], **asdict(layout)}
                for lanes, layout in record.layouts.items()
            ],
            "rounds": {name: asdict(verdict) for name, verdict in record.verdicts.items()},
        }


def _total(verdicts: Sequence[Verdict], name: str) -> float | None:
    found = [getattr(each, name) for each in verdicts if getattr(each, name) is not None]
    return sum(found) if found else None


def _until(record: StackRecord) -> int | None:
    """Return how many ticks members took as one program that have gone on one by one; None where they have not."""
    ends = [each.since_tick for each in record.verdicts.values() if each.before is not None and not each.is_fused]
    if record.reason and any(each.is_fused for each in record.verdicts.values()):
        ends.append(record.since_tick)
    return max(ends, default=None)


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


__all__ = ["RunRequest", "run_together"]

WhenEnded = Callable[[int, RunResult | BaseException], None]

_OF_THE_PROCESS = ("num_threads", "deterministic", "tf32")
"""Settings of a run that concern its whole process."""


def run_together(
    requests: Sequence[RunRequest],
    *,
    record: Path | None,
    when_ended: WhenEnded,
) -> None:
    """Run several configs in this process; one that fails does not end the others.

    Args:
        requests: the runs, in the order that they had in an earlier process that was to run them; those that have
            ended there are among them.
        record: a file that takes which of them ran as one program, with the times measured; None writes none.
        when_ended: called with a run's place in `requests` and its result or error, as soon as it has ended; not for
            those that had ended before.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the runs have written their checkpoints and summaries.
    """
    alone = [number for number, each in enumerate(requests) if count_devices(each.config.runner) > 1]
    together = [number for number in range(len(requests)) if number not in alone]
    book = FusionRecord(record, [_job(each) for each in requests])
    for number in alone:
        book.note([number], "runner.devices is above 1: each has processes of its own")
    for settings in dict.fromkeys(_of_process(requests[number]) for number in together):
        members = {number: requests[number] for number in together if _of_process(requests[number]) == settings}
        _run_company(members, book, when_ended)
    for number in alone:
        if requests[number].ended_at is None:
            _run_alone(number, requests[number], when_ended)


def _run_company(requests: Mapping[int, RunRequest], book: FusionRecord, when_ended: WhenEnded) -> None:
    """Run those that ask for the same settings of the process, as many at a time as there is memory for."""
    runner = next(iter(requests.values())).config.runner
    keep_freed_memory()
    with (
        torch_settings(**{key: runner[key] for key in _OF_THE_PROCESS}),
        quiet_lightning(),
        terminable(),
        announcements(),
        untracked_past(),
    ):
        device, shared = find_device(runner), SharedData()
        waiting = list(requests)
        while waiting:
            # Those that began together in an earlier process do so again, however much memory there is now.
            known = book.began_together(waiting)
            members = known or waiting
            ends = {number: end for number in members if (end := requests[number].ended_at) is not None}
            structures = {number: structure_of(requests[number].config) for number in members}
            runs = {number: partial(_run, requests[number], device) for number in members if number not in ends}
            company = Company(runs, shared, when_ended)
            company.ticks = FusedTicks(structures, ends, book.stacks(), book.take, company.world)
            with company.interrupt.listening():
                left = company.begin((lambda: True) if known else MemoryRoom(device).takes_one_more)
                if not company.interrupt.requested:
                    book.begin([number for number in members if number in ends or company.has_place(number)])
                company.run()
            waiting = [number for number in waiting if number in left or number not in members]


def _run(request: RunRequest, device: torch.device, seat: AbstractSeat) -> RunResult:
    resume = request.resume or request.config.get("resume")
    return run_here(replace(request, resume=resume), device, Ranks(), seat)


def _run_alone(number: int, request: RunRequest, when_ended: WhenEnded) -> None:
    result: RunResult | BaseException
    try:
        result = run(request.config, output_dir=request.output_dir, origin=request.origin, watch=request.watch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        result = error
    when_ended(number, result)


def _of_process(request: RunRequest) -> tuple[Any, ...]:
    return tuple(request.config.runner[key] for key in ("num_threads", "deterministic", "tf32", "accelerator"))


def _job(request: RunRequest) -> int:
    """Return the number of a run's job in its sweep, by which its folder is named."""
    name = "" if request.output_dir is None else request.output_dir.name
    return int(name) if name.isdigit() else -1
