"""Keeps as many jobs going as there are workers, until no point is left."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mlotool.config.sweep_plan import SweepPlan
from mlotool.sweep.devices import VARIABLE, visible_devices, worker_devices
from mlotool.sweep.job_folder import JobOutcome, JobSpec, begin_job, note_failure, read_outcome
from mlotool.sweep.launchers import PATIENCE_S, AbstractHandle, AbstractLauncher
from mlotool.sweep.points import AbstractPoints, Point

SECONDS_BETWEEN_LOOKS = 0.05
Announce = Callable[[Point, JobOutcome], None]


def run_jobs(
    points: AbstractPoints,
    launcher: AbstractLauncher,
    workers: list[dict[str, str]],
    folder: Path,
    shared: JobSpec,
    announce: Announce,
) -> None:
    """Run the jobs that `points` gives, each in a folder of its own; one that fails does not end the others.

    Args:
        points: gives them.
        launcher: starts them.
        workers: the environment of each worker, of which each runs one job at a time.
        folder: of the sweep.
        shared: what all jobs have in common.
        announce: called when a job has ended.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the jobs have ended.
    """
    running: dict[int, tuple[Point, AbstractHandle]] = {}
    try:
        while True:
            for worker in range(len(workers)):
                point = points.next() if worker not in running else None
                if point is not None:
                    spec = replace(shared, words=(*shared.words, *point.words), study=point.study)
                    begin_job(folder / str(point.number), spec)
                    running[worker] = (point, launcher.start(folder / str(point.number), workers[worker]))
            if not running:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for worker, (point, handle) in list(running.items()):
                if handle.is_done():
                    del running[worker]
                    outcome = _outcome(folder / str(point.number), handle, (*shared.words, *point.words))
                    points.finish(point, outcome)
                    announce(point, outcome)
    finally:
        _stop([handle for _, handle in running.values()])


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


def _outcome(folder: Path, handle: AbstractHandle, words: tuple[str, ...]) -> JobOutcome:
    outcome = read_outcome(folder)
    if outcome.status == "unfinished":
        note_failure(folder, words, f"The job left no summary: {handle.ending()}. Read {folder / 'log.txt'}.")
        return read_outcome(folder)
    return outcome


def _stop(handles: list[AbstractHandle]) -> None:
    for handle in handles:
        handle.stop()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not all(handle.is_done() for handle in handles):
        time.sleep(SECONDS_BETWEEN_LOOKS)
