"""Several runs in one process, each of which leaves an ordinary run folder."""

import gc
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from greenlet import greenlet
from pydantic import TypeAdapter
from pytorch_lightning import Callback

from mlotool.config.composition import plain
from mlotool.config.user_data import SharedData
from mlotool.core.errors import Interrupted, WriteError
from mlotool.core.messages import escape
from mlotool.core.random_stream import outside_torch
from mlotool.distributed.collectives import Ranks
from mlotool.folders.files import write_text, writing
from mlotool.folders.safe_files import read_json
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.fusion.fused_ticks import FusedTicks, StackRecord, keep_freed_memory
from mlotool.fusion.stacked_gradients import Verdict
from mlotool.fusion.stacked_schedule import Layout
from mlotool.program import Schedule
from mlotool.runner.checkpoint import global_state, random_state, restore_global_state, restore_random_state
from mlotool.runner.population import Exchange
from mlotool.runner.process_settings import Interrupt, count_devices, find_device, own_settings
from mlotool.runner.run_config import RunRequest, RunResult, run, run_here
from mlotool.runner.session import AbstractSeat, Keep

# Share of the memory that stays free: for what evaluations and checkpoints take, and for other processes.
RESERVE = 0.25

_MEMINFO = Path("/proc/meminfo")
# Limit and use of a container or a cluster's job, by the versions of control groups.
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


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
        self._free, _ = self._look()

    def takes_one_more(self) -> bool:
        """Say, after a run has begun, whether one more is expected to fit; it is where nothing is known."""
        before = self._free
        self._free, total = self._look()
        self._largest = max(self._largest, before - self._free)
        return self._free - 2 * self._largest >= RESERVE * total

    def _look(self) -> tuple[int, int]:
        """Return the bytes that are free, and all; zeros where they are not known."""
        if self._device.type == "cuda":
            gc.collect()
            free, total = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return free + unused, total
        try:
            lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
            free, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        except (OSError, KeyError, ValueError):
            return 0, 0
        for limit, use in _GROUPS:
            # "max" is none.
            with suppress(OSError, ValueError):
                most, used = int(limit.read_text()), int(use.read_text())
                if most < total:
                    free, total = min(free, most - used), most
        return free, total


_VERDICTS, _LAYOUT = TypeAdapter(dict[str, Verdict]), TypeAdapter(Layout)


class FusionRecord:
    """Keeps the record of a group of runs in a file.

    A file that is not as it was written is as good as none, with a warning: nothing in it could make a gradient wrong,
    but runs that share a program in another way than before have other last bits.

    Args:
        path: of the file; None keeps none.
        jobs: by number of the run, that of its job.
    """

    def __init__(self, path: Path | None, jobs: Sequence[int]) -> None:
        self._path, self._jobs = path, list(jobs)
        self._stacks: dict[tuple[int, ...], StackRecord] = {}
        self._waves: list[list[int]] = []
        if path is None or not path.is_file():
            return
        try:
            content = read_json(path.parent, path.name) or {}
            waves = [[*self._numbers(wave)] for wave in content.get("waves", [])]
            stacks = [self._read(stack) for stack in content["stacks"]]
        # Of what is not as it was written it may be any error.
        except Exception as error:
            warnings.warn(
                f"{path}: found {escape(' '.join(str(error).split())[:200])}; expected the file of an earlier process. "
                "Which runs are fused is decided anew, so results may differ in their last bits.",
                stacklevel=2,
            )
        else:
            self._waves, self._stacks = waves, {stack.members: stack for stack in stacks}

    def stacks(self) -> list[StackRecord]:
        """Return what was found out before, by numbers of runs."""
        return list(self._stacks.values())

    def began_together(self, waiting: Sequence[int]) -> list[int]:
        """Return which of the runs that wait began together first, in an earlier process; none where none did."""
        waves = ([number for number in wave if number in waiting] for wave in self._waves)
        return next(filter(None, waves), [])

    def begin(self, members: Sequence[int]) -> None:
        """Write down which runs have begun together."""
        if [*members] not in self._waves:
            self._waves.append([*members])
        self.take([])

    def take(self, records: Sequence[StackRecord]) -> None:
        """Write down what has been found out."""
        self._stacks |= {stack.members: stack for stack in records}
        if self._path is None:
            return
        known = [stack for stack in self._stacks.values() if stack.reason or stack.verdicts or stack.layouts]
        content = {
            "jobs": self._jobs,
            "waves": [self._jobs_of(wave) for wave in self._waves],
            "stacks": [self._plain(stack) for stack in known],
        }
        try:
            with writing(self._path):
                self._path.parent.mkdir(exist_ok=True)
            write_text(self._path, json.dumps(content, indent=2) + "\n")
        except WriteError as error:
            # The runs themselves may still find room.
            warnings.warn(str(error), stacklevel=2)

    def _jobs_of(self, members: Sequence[int]) -> list[int]:
        return [self._jobs[member] for member in members]

    def _numbers(self, jobs: Sequence[int]) -> tuple[int, ...]:
        if not jobs or len(set(jobs)) < len(jobs) or not set(jobs) <= set(self._jobs):
            raise ValueError(f"jobs {str(jobs)[:80]}")
        return tuple(self._jobs.index(job) for job in jobs)

    def _read(self, stack: Mapping[str, Any]) -> StackRecord:
        apart = stack["apart"]
        layouts = {self._numbers(rows["jobs"]): _LAYOUT.validate_python(rows) for rows in stack["layouts"]}
        verdicts = _VERDICTS.validate_python(stack["rounds"])
        return StackRecord(self._numbers(stack["jobs"]), verdicts, apart["reason"], int(apart["since_tick"]), layouts)

    def _plain(self, stack: StackRecord) -> dict[str, Any]:
        verdicts = stack.verdicts.values()
        reasons = dict.fromkeys(filter(None, [stack.reason, *(verdict.reason for verdict in verdicts)]))
        return {
            "jobs": self._jobs_of(stack.members),
            # For the page of a sweep.
            "is_fused": any(verdict.is_fused for verdict in verdicts) and not stack.reason,
            "until_tick": _until(stack),
            "fused_s": _total(verdict.fused_s for verdict in verdicts),
            "alone_s": _total(verdict.alone_s for verdict in verdicts),
            "reason": "; ".join(reasons),
            # For a process that goes on with these runs.
            "apart": {"reason": stack.reason, "since_tick": stack.since_tick},
            "layouts": [{"jobs": self._jobs_of(rows), **asdict(layout)} for rows, layout in stack.layouts.items()],
            "rounds": {name: asdict(verdict) for name, verdict in stack.verdicts.items()},
        }


def _total(seconds: Iterable[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if known else None


def _until(stack: StackRecord) -> int | None:
    """Return how many ticks members took as one program that have gone on one by one; None where they have not."""
    verdicts = stack.verdicts.values()
    ends = [verdict.since_tick for verdict in verdicts if verdict.before is not None and not verdict.is_fused]
    if stack.reason and any(verdict.is_fused for verdict in verdicts):
        ends.append(stack.since_tick)
    return max(ends, default=None)


class Seat(AbstractSeat):
    """The place of one run: a coroutine that hands over where it would take its ticks.

    Args:
        company: all runs.
        number: of this one.
        run: what it does.

    Attributes:
        coroutine: runs it.
        has_begun: whether it has taken ticks in an earlier process.
        schedule: whose ticks it waits for, `count` of them; `keep` takes their results, `due_at` ends the wait early.
        error: what one of these ticks has raised.
        is_over: whether the run goes on with what it has.
        random: its global random numbers while it waits.
        seconds: that it has taken, until it was let go on at `since`; None while it waits.
    """

    schedule: Schedule
    keep: Keep
    random: dict[str, Any]

    def __init__(self, company: "Company", number: int, run: Callable[[AbstractSeat], Any]) -> None:
        self.interrupt, self.shared = company.interrupt, company.shared
        self.number, self._company = number, company
        self.coroutine = greenlet(partial(run, self))
        self.has_begun = self.is_over = False
        self.count, self.due_at = 0, math.inf
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.since: float | None = None

    def clock(self) -> float:
        """Return the seconds that this run has taken, with its share of the ticks of all."""
        return self.seconds + (0.0 if self.since is None else time.perf_counter() - self.since)

    def join(self, schedule: Schedule) -> None:
        """Take the place that a run has had before, or a new one."""
        if schedule.num_ticks > 0:
            self.has_begun = True
            self._company.ticks.join(self.number, schedule)

    def member(self) -> Callback | None:
        """Return its place in the population, where the runs are one."""
        exchange = self._company.exchange
        return None if exchange is None else exchange.member(self.number, self.meet)

    def meet(self) -> None:
        """Let the other runs go on until all are at this tick, and have exchanged their states."""
        self.error, self.random = None, random_state()
        self._company.meet(self)
        restore_random_state(self.random)
        if self.error is not None:
            raise self.error

    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Let the other runs go on until these ticks are taken."""
        if count > 0:
            self.schedule, self.count, self.keep, self.due_at = schedule, count, keep, due_at
            self.is_over, self.error, self.random = False, None, random_state()
            self._company.wait(self)
            restore_random_state(self.random)
            if self.error is not None:
                raise self.error


class Company:
    """Several runs in one process, whose ticks are taken together once all of them wait for some.

    What a run changes in the whole process, the global random numbers, is its own.

    Args:
        runs: what each run does, given its seat; what it returns or raises is its result.
        shared: what runs share that are built from equal configs.
        when_ended: called with the number and the result of a run that has ended.
        exchange: where the runs meet as members of a population; None where they are none.

    Attributes:
        ticks: takes the ticks; to be set before the runs begin.
    """

    ticks: FusedTicks

    def __init__(
        self,
        runs: Mapping[int, Callable[[AbstractSeat], Any]],
        shared: Any,
        when_ended: Callable[[int, Any], None],
        exchange: Exchange | None = None,
    ) -> None:
        self.interrupt, self.shared, self.exchange = Interrupt(), shared, exchange
        self._when_ended = when_ended
        self._seats = {number: Seat(self, number, run) for number, run in runs.items()}
        # Those that wait for their ticks.
        self._waiting: dict[int, Seat] = {}
        # Those that wait for all others to be at their tick.
        self._meeting: dict[int, Seat] = {}
        self._conductor = greenlet.getcurrent()
        self._interrupted: KeyboardInterrupt | None = None

    def begin(self, has_room: Callable[[], bool]) -> list[int]:
        """Let the runs begin, until each waits for its ticks; return the numbers of those that found no room.

        Args:
            has_room: asked after each run, whether the next one fits as well.
        """
        left = list(self._seats)
        while left and not self.interrupt.requested:
            number = left.pop(0)
            self._resume(self._seats[number])
            if not self.has_place(number):
                # It has ended before its first tick, in this process and before.
                self.ticks.leave_out([number])
            if not has_room():
                break
        self.ticks.leave_out(left)
        return left

    def has_place(self, number: int) -> bool:
        """Say whether a run waits for its ticks, or has taken some in an earlier process."""
        return number in self._waiting or number in self._meeting or self._seats[number].has_begun

    def run(self) -> None:
        """Let those that have begun run to their ends.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once all have ended.
        """
        while self._waiting or self._meeting:
            waiting = self._behind()
            if not waiting:
                self._exchange()
                continue
            try:
                # After a signal while they began some may not be there, without whom a tick would have other last bits.
                if not self.interrupt.requested:
                    self._take_ticks(waiting)
            except BaseException as error:
                # Each run ends in its own way, with its checkpoint and summary.
                for seat in waiting:
                    seat.error, seat.is_over = error, True
            for seat in waiting:
                if seat.is_over or self.interrupt.requested:
                    del self._waiting[seat.number]
                    self._resume(seat)
        if self._interrupted is not None:
            raise self._interrupted
        if self.interrupt.requested:
            raise Interrupted(self.interrupt.exit_code)

    def _behind(self) -> list[Seat]:
        """Return the runs that wait for their ticks, without those that are as far as the ones that meet."""
        waiting = list(self._waiting.values())
        if not self._meeting or self.interrupt.requested:
            return waiting
        # All that meet are at one tick: nobody goes on from it alone.
        tick = min(self.ticks.progress(seat.number) for seat in self._meeting.values())
        return [seat for seat in waiting if self.ticks.progress(seat.number) < tick]

    @contextmanager
    def world(self, number: int) -> Iterator[Callable[[], bool]]:
        """Let numpy's and Python's global random numbers be those of a run that waits; yield whether it has drawn."""
        outside, inside = global_state(), self._seats[number].random
        restore_global_state(inside)
        begin = outside_torch()
        try:
            yield lambda: outside_torch() != begin
        finally:
            inside.update(global_state())
            restore_global_state(outside)

    def wait(self, seat: Seat) -> None:
        """Hand over to the other runs until a run's ticks are taken; for the run itself."""
        self.ticks.join(seat.number, seat.schedule)
        self._waiting[seat.number] = seat
        self._conductor.switch()

    def meet(self, seat: Seat) -> None:
        """Hand over until all other runs are at a run's tick; for the run itself."""
        self._meeting[seat.number] = seat
        self._conductor.switch()

    def _exchange(self) -> None:
        seats, self._meeting = self._meeting, {}
        # After a signal they stop where they are, and meet again when they go on.
        if self.exchange is not None and not self.interrupt.requested:
            try:
                self.exchange.meet()
            except BaseException as error:
                for seat in seats.values():
                    seat.error = error
        for seat in seats.values():
            self._resume(seat)

    def _resume(self, seat: Seat) -> None:
        """Let a run go on until it waits again or ends."""
        result: Any
        seat.since = time.perf_counter()
        try:
            result = seat.coroutine.switch()
        except KeyboardInterrupt as error:
            self._interrupted = self._interrupted or error
            self.interrupt.insist()
            result = error
        except BaseException as error:
            result = error
        seat.seconds, seat.since = seat.clock(), None
        # Lightning puts handlers of its own in their place, and takes them back.
        self.interrupt.listen()
        if seat.coroutine.dead:
            self.ticks.leave(seat.number)
            if not isinstance(result, KeyboardInterrupt):
                self._when_ended(seat.number, result)

    def _take_ticks(self, waiting: Sequence[Seat]) -> None:
        """Take ticks of the runs that are furthest behind, until one of them has what it wants."""
        lowest = min(seat.schedule.num_ticks for seat in waiting)
        behind = {seat.number: seat for seat in waiting if seat.schedule.num_ticks == lowest}
        ahead = [seat.schedule.num_ticks - lowest for seat in waiting if seat.number not in behind]
        count = min([*(seat.count for seat in behind.values()), *ahead])
        due_at = min(seat.due_at for seat in behind.values())
        began, taking = time.perf_counter(), list(behind.values())
        self.ticks.begin([*behind])
        for number_of_tick in range(count):
            # Within these ticks no run goes on with anything else.
            outcomes = self.ticks.tick([*behind], may_have_changed=number_of_tick == 0)
            for number, outcome in outcomes.items():
                seat = behind[number]
                if isinstance(outcome, Exception):
                    seat.error, seat.is_over = outcome, True
                    del behind[number]
                elif outcome is not None:
                    seat.keep(outcome)
                    seat.count -= 1
            if not behind or self.interrupt.seen() or time.monotonic() >= due_at:
                break
        share, now = (time.perf_counter() - began) / len(taking), time.monotonic()
        for seat in taking:
            seat.seconds += share
        for seat in behind.values():
            seat.is_over = seat.count == 0 or now >= seat.due_at


def run_together(
    requests: Sequence[RunRequest],
    *,
    record: Path | None,
    when_ended: Callable[[int, RunResult | BaseException], None],
    population: SweepFolder | None = None,
) -> None:
    """Run several configs in this process; one that fails does not end the others.

    Args:
        requests: the runs, in the order that they had in an earlier process that was to run them; those that have
            ended there are among them.
        record: a file that takes which of them ran as one program, with the times measured; None writes none.
        when_ended: called with a run's place in `requests` and its result or error, as soon as it has ended; not for
            those that had ended before.
        population: the folder of a sweep whose jobs are members of a population; None where they are none.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the runs have written their checkpoints and summaries.
    """
    companies: dict[tuple[Any, ...], dict[int, RunRequest]] = {}
    apart: dict[int, RunRequest] = {}
    for number, request in enumerate(requests):
        runner = request.config.runner
        # What concerns the whole process.
        settings = tuple(runner[key] for key in ("num_threads", "deterministic", "tf32", "accelerator"))
        members = apart if count_devices(runner) > 1 else companies.setdefault(settings, {})
        members[number] = request
    # A job's folder has its number in the sweep.
    names = ["" if request.output_dir is None else request.output_dir.name for request in requests]
    jobs = [int(name) if name.isdigit() else -1 for name in names]
    book, exchange = FusionRecord(record, jobs), None if population is None else Exchange(population, jobs, print)
    reason = "runner.devices is above 1: each has processes of its own"
    if apart:
        book.take([StackRecord((number,), reason=reason) for number in apart])
    for members in companies.values():
        _run_company(members, book, when_ended, exchange)
    for number, request in apart.items():
        if request.ended_at is None:
            result: RunResult | BaseException
            try:
                result = run(request.config, output_dir=request.output_dir, origin=request.origin, watch=request.watch)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                result = error
            when_ended(number, result)


# Parts of a config that say nothing of the program's structure.
_OF_A_RUN = (
    *("seed", "name", "runner", "evaluate", "objective", "objective_mode", "analyses", "logger", "sweep"),
    *("resume", "inherit", "decisions_from"),
)

# Settings of a problem that concern its own steps alone.
_OF_A_STEP = ("optimizer", "scheduler", "scheduler_interval", "gradient_clip_norm")


def structure_of(config: Any) -> str:
    """Return a text that is the same for configs whose programs differ in no more than numbers.

    Those are seeds, numbers of the data and of losses, and what concerns steps: optimizers, schedulers, clipping.

    Args:
        config: a composed config.

    Example:
        >>> from mlotool.config import compose
        >>> words = ("seed=0", "seed=1", "problems.classifier.stream.batch_size=10")
        >>> first, second, third = (structure_of(compose("plain", [word])) for word in words)
        >>> first == second, first == third
        (True, False)
    """
    values = plain(config)
    parts = {key: value for key, value in values.items() if key not in _OF_A_RUN}
    parts["data"] = _without_numbers(parts.get("data"))
    parts["problems"] = {
        name: {
            key: _without_numbers(value) if key == "loss" else value
            for key, value in problem.items()
            if key not in _OF_A_STEP or _is_search(value)
        }
        for name, problem in parts["problems"].items()
    }
    parts["trace"] = values["runner"].get("trace")
    return json.dumps(_without_seeds(parts), sort_keys=True, default=str)


def _is_search(value: Any) -> bool:
    """Return whether a node is an optimizer that evaluates the loss itself, and so runs by itself."""
    return isinstance(value, Mapping) and str(value.get("_target_")).endswith(".LBFGS")


def _without_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else value


def _without_seeds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_seeds(item) for key, item in value.items() if key != "seed"}
    return [_without_seeds(item) for item in value] if isinstance(value, list) else value


def _run_company(
    requests: Mapping[int, RunRequest],
    book: FusionRecord,
    when_ended: Callable[[int, RunResult | BaseException], None],
    exchange: Exchange | None,
) -> None:
    """Run those that ask for the same settings of the process, as many at a time as there is memory for."""
    runner = next(iter(requests.values())).config.runner
    keep_freed_memory()
    with own_settings(runner):
        device, shared = find_device(runner), SharedData()
        waiting = list(requests)
        while waiting:
            # Those that began together in an earlier process do so again, however much memory there is now.
            known = book.began_together(waiting)
            members = known or waiting
            ends = {number: end for number in members if (end := requests[number].ended_at) is not None}
            structures = {number: structure_of(requests[number].config) for number in members}
            runs = {number: partial(_run, requests[number], device) for number in members if number not in ends}
            company = Company(runs, shared, when_ended, exchange)
            company.ticks = FusedTicks(structures, ends, book.stacks(), book.take, company.world)
            with company.interrupt.listening():
                # Members of a population have to be there at the same time.
                fits_all = known or exchange is not None
                left = company.begin((lambda: True) if fits_all else MemoryRoom(device).takes_one_more)
                if not company.interrupt.requested:
                    book.begin([number for number in members if number in ends or company.has_place(number)])
                company.run()
            waiting = [number for number in waiting if number in left or number not in members]


def _run(request: RunRequest, device: torch.device, seat: AbstractSeat) -> RunResult:
    resume = request.resume or request.config.get("resume")
    return run_here(replace(request, resume=resume), device, Ranks(), seat)
