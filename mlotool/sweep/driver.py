"""Keeps as many groups of jobs going as there are workers, until no point is left."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.sweep import job_folder
from mlotool.sweep.job_folder import ENDED, INFEASIBLE, INTERRUPTED, JobOutcome, JobSpec, note_failure, read_outcome
from mlotool.sweep.launchers import PATIENCE_S, AbstractHandle, Launcher
from mlotool.sweep.points import AbstractPoints, Group, Point

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, by number or name; none where there is no NVIDIA driver."""
    listed = environment.get(VARIABLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    if shutil.which("nvidia-smi") is None:
        return []
    # Not torch: its import takes seconds, and would open the devices here.
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.split() if result.returncode == 0 else []


def worker_devices(devices: Sequence[str], num_workers: int, *, per_job: int, jobs_per_device: int) -> list[list[str]]:
    """Return each worker's devices; empty lists where there are none to share out.

    Args:
        devices: to share out.
        num_workers: jobs at a time.
        per_job: devices that one job takes.
        jobs_per_device: jobs that may use one device at a time.

    Raises:
        ConfigError: there are too few.

    Example:
        >>> worker_devices(["0", "1", "2", "3"], 2, per_job=2, jobs_per_device=1)
        [['0', '1'], ['2', '3']]
    """
    if not devices:
        return [[] for _ in range(num_workers)]
    groups = [list(devices[begin : begin + per_job]) for begin in range(0, len(devices) - per_job + 1, per_job)]
    possible = len(groups) * jobs_per_device
    if num_workers > possible:
        share = -(-num_workers // len(groups)) if groups else None
        advice = f"sweep.workers={possible}" if possible else f"runner.devices={len(devices)}"
        raise ConfigError(
            f"sweep.workers: found {num_workers} with the devices {', '.join(devices)}, of which a job takes "
            f"{per_job}; expected at most {possible} workers, as others would share a device. Set {advice}"
            + (f", or sweep.jobs_per_device={share} if they may share." if share else ".")
        )
    return [groups[index % len(groups)] for index in range(num_workers)]


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


def run_jobs(points: AbstractPoints, launcher: Launcher, workers: list[dict[str, str]], sweep: Sweep) -> None:
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
            for worker, process in list(running.items()):
                # Asked first: what a process writes before its end is then seen below.
                is_done = process.handle is None or process.handle.is_done()
                for point, outcome in process.ended(is_done=is_done):
                    points.finish(point, outcome)
                    sweep.announce(point, outcome)
                if is_done:
                    del running[worker]
    finally:
        _stop([process.handle for process in running.values() if process.handle is not None])


@dataclass
class _Running:
    """A group whose process was started.

    Args:
        waiting: its jobs that have not ended.
        folders: of each job, by its number.
        words: of each job, by its number.
        handle: of the process; None where no job is to be run.
    """

    waiting: list[Point]
    folders: dict[int, Path]
    words: dict[int, tuple[str, ...]]
    handle: AbstractHandle | None

    def ended(self, *, is_done: bool) -> list[tuple[Point, JobOutcome]]:
        """Return the jobs that have ended since the last call, with what became of them; all once the process has."""
        outcomes = [(point, self._outcome(point.number, is_done=is_done)) for point in self.waiting]
        # One that was interrupted may go on: it is the end of its process that ends it here.
        self.waiting = [point for point, outcome in outcomes if not is_done and outcome.status not in ENDED]
        return [(point, outcome) for point, outcome in outcomes if is_done or outcome.status in ENDED]

    def _outcome(self, number: int, *, is_done: bool) -> JobOutcome:
        folder = self.folders[number]
        outcome = read_outcome(folder)
        if outcome.status != "unfinished" or not is_done or self.handle is None:
            return outcome
        ending = self.handle.ending()
        status, advice = (INTERRUPTED, " With resume=auto it goes on.") if ending.was_killed else ("failed", "")
        error = (
            f"The job left no summary: {ending.text}. Read {job_folder.log_of(list(self.folders.values()))}.{advice}"
        )
        note_failure(folder, self.words[number], error, status)
        return read_outcome(folder)


def _begin(group: Group, launcher: Launcher, environment: dict[str, str], sweep: Sweep) -> _Running:
    trained = replace(group, points=tuple(point for point in group.points if point.refused is None))
    if sweep.when_begins is not None and trained.points:
        sweep.when_begins(trained)
    folders = {point.number: sweep.folder / str(point.number) for point in group.points}
    words = {point.number: (*sweep.spec.words, *point.words) for point in group.points}
    for point in group.points:
        prepare = job_folder.write_job if point.number in group.ended else job_folder.begin_job
        prepare(folders[point.number], replace(sweep.spec, words=words[point.number], study=point.study))
        if point.refused is not None:
            note_failure(folders[point.number], words[point.number], point.refused, INFEASIBLE)
    begun = [folders[point.number] for point in trained.points]
    return _Running(group.waiting, folders, words, launcher(begun, environment) if begun else None)


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
