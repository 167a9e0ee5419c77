"""Keeps as many groups of jobs going as there are workers, until no point is left."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlotool.config.sweep_plan import SweepPlan
from mlotool.sweep.devices import VARIABLE, visible_devices, worker_devices
from mlotool.sweep.groups import Group, Point
from mlotool.sweep.job_folder import (
    ENDED,
    INFEASIBLE,
    INTERRUPTED,
    SUMMARY,
    JobOutcome,
    JobSpec,
    begin_job,
    log_of,
    note_failure,
    read_outcome,
    write_job,
)
from mlotool.sweep.launchers import PATIENCE_S, AbstractHandle, AbstractLauncher
from mlotool.sweep.points import AbstractPoints

SECONDS_BETWEEN_LOOKS = 0.05
Announce = Callable[[Point, JobOutcome], None]


@dataclass(frozen=True)
class Sweep:
    """What all jobs of a sweep have in common.

    Args:
        folder: of the sweep.
        spec: of its jobs, without what differs between them.
        announce: called with each job that has ended.
        when_begins: called with each group that is about to begin; None where nobody wants to know.
    """

    folder: Path
    spec: JobSpec
    announce: Announce
    when_begins: Callable[[Group], None] | None = None


def run_jobs(points: AbstractPoints, launcher: AbstractLauncher, workers: list[dict[str, str]], sweep: Sweep) -> None:
    """Run the jobs that `points` gives, each in a folder of its own; one that fails does not end the others.

    Args:
        points: gives them, those of one process at a time.
        launcher: starts the processes.
        workers: the environment of each worker, of which each runs one process at a time.
        sweep: what all jobs have in common.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the jobs have ended.
    """
    running: dict[int, _Running] = {}
    try:
        while True:
            for worker in range(len(workers)):
                group = points.next() if worker not in running else None
                if group is not None:
                    running[worker] = _begin(group, launcher, workers[worker], sweep)
            if not running:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for worker, each in list(running.items()):
                # Asked first: what a process writes before its end is then seen below.
                is_done = each.handle.is_done()
                for point, outcome in each.ended(is_done=is_done):
                    points.finish(point, outcome)
                    sweep.announce(point, outcome)
                if is_done:
                    del running[worker]
    finally:
        _stop([each.handle for each in running.values()])


class _Running:
    """A group whose process was started.

    Args:
        group: its jobs.
        folders: of each job, by its number.
        words: of each job, by its number.
        handle: of the process.
    """

    def __init__(
        self, group: Group, folders: dict[int, Path], words: dict[int, tuple[str, ...]], handle: AbstractHandle
    ) -> None:
        self.handle = handle
        self._folders, self._words = folders, words
        self._waiting = group.waiting

    def ended(self, *, is_done: bool) -> list[tuple[Point, JobOutcome]]:
        """Return the jobs that have ended since the last call, with what became of them; all once the process has."""
        found, waiting = [], []
        for point in self._waiting:
            outcome = self._outcome(point.number) if is_done else self._early_outcome(point.number)
            if outcome is None:
                waiting.append(point)
            else:
                found.append((point, outcome))
        self._waiting = waiting
        return found

    def _early_outcome(self, number: int) -> JobOutcome | None:
        """Return how a job of a process that goes on has ended; None where it has not."""
        folder = self._folders[number]
        if not (folder / SUMMARY).exists():
            return None
        outcome = read_outcome(folder)
        # One that was interrupted may go on: it is the end of its process that ends it here.
        return outcome if outcome.status in ENDED else None

    def _outcome(self, number: int) -> JobOutcome:
        folder = self._folders[number]
        outcome = read_outcome(folder)
        if outcome.status == "unfinished":
            log = log_of(list(self._folders.values()))
            error = f"The job left no summary: {self.handle.ending()}. Read {log}."
            if self.handle.was_killed():
                note_failure(folder, self._words[number], f"{error} With resume=auto it goes on.", INTERRUPTED)
            else:
                note_failure(folder, self._words[number], error)
            return read_outcome(folder)
        return outcome


def _begin(group: Group, launcher: AbstractLauncher, environment: dict[str, str], sweep: Sweep) -> _Running:
    trained = replace(group, points=tuple(point for point in group.points if point.refused is None))
    if sweep.when_begins is not None and trained.points:
        sweep.when_begins(trained)
    folders = {point.number: sweep.folder / str(point.number) for point in group.points}
    words = {point.number: (*sweep.spec.words, *point.words) for point in group.points}
    for point in group.points:
        prepare = write_job if point.number in group.ended else begin_job
        prepare(folders[point.number], replace(sweep.spec, words=words[point.number], study=point.study))
        if point.refused is not None:
            note_failure(folders[point.number], words[point.number], point.refused, INFEASIBLE)
    begun = [folders[point.number] for point in trained.points]
    return _Running(group, folders, words, launcher.start(begun, environment) if begun else _Nothing())


class _Nothing(AbstractHandle):
    """Of jobs none of which is to run."""

    def is_done(self) -> bool:
        return True

    def stop(self) -> None:
        pass

    def ending(self) -> str:
        return "it was not run"

    def was_killed(self) -> bool:
        return False


def worker_environments(plan: SweepPlan, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Return what each worker of this machine sets for its jobs: its devices, and its share of the CPU's threads.

    Raises:
        ConfigError: there are fewer devices than jobs at a time need.
    """
    settings = plan.settings
    num_workers: int = settings["workers"]
    if settings["launcher"] != "local":
        # A cluster gives its jobs what they ask for in sweep.launcher_options.
        return [{} for _ in range(num_workers)]
    listed = settings["devices"]
    devices = visible_devices(environment) if listed is None else list(listed)
    if plan.accelerator == "cpu":
        devices = []
    shares = worker_devices(
        devices, num_workers, per_job=plan.devices_per_job, jobs_per_device=settings["jobs_per_device"]
    )
    threads = {}
    if num_workers > 1 and "OMP_NUM_THREADS" not in environment:
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers))}
    return [{**threads, **({VARIABLE: ",".join(share)} if share else {})} for share in shares]


def _stop(handles: list[AbstractHandle]) -> None:
    for handle in handles:
        handle.stop()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not all(handle.is_done() for handle in handles):
        time.sleep(SECONDS_BETWEEN_LOOKS)
