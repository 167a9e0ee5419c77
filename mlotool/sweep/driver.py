"""Where a sweep's jobs run - processes of this machine, SLURM, or Ray - and what keeps its workers going."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlotool.config.sweeps.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.folders.files import writing
from mlotool.folders.run_folder import ENDED, INFEASIBLE, INTERRUPTED
from mlotool.sweep import folder as job_folder
from mlotool.sweep.folder import JobOutcome, JobSpec, note_failure, read_outcome
from mlotool.sweep.points import AbstractPoints, Group, Point
from mlotool.sweep.study_options import import_extra

# What `python -m` runs in a process of jobs.
MODULE = "mlotool.cli.sweep_job"
STOP = b"s"


def start_process(folders: Sequence[Path], environment: Mapping[str, str], module: str) -> "subprocess.Popen[bytes]":
    """Start the jobs that folders describe; it ends when this process dies, or when STOP is written to its input.

    Args:
        folders: the jobs'.
        environment: variables that it gets beside those of this process.
        module: what `python -m` runs, MODULE but in tests.
    """
    with open_log(folders) as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, folders)],
            # A pipe of which nobody else has the other end: the job sees it close, however this process dies.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # A Ctrl-C on the terminal is for the sweep, which then stops its jobs.
            start_new_session=True,
        )


def open_log(folders: Sequence[Path]) -> BinaryIO:
    """Open the file that takes what the process of these jobs prints."""
    path = job_folder.log_of(folders)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")


def run_process(folders: Sequence[str], environment: Mapping[str, str], module: str) -> int:
    """Run jobs to their end, on the machine where a cluster calls this; return the exit code."""
    return start_process([*map(Path, folders)], environment, module).wait()


PATIENCE_S = 30.0

_SLURM_KILLS = ("CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")


class Ending(NamedTuple):
    """How a process has ended.

    Args:
        text: in words.
        was_killed: whether something outside has ended it: then its jobs go on when the sweep does.
    """

    text: str
    was_killed: bool

    @classmethod
    def of(cls, code: int) -> "Ending":
        """Return what an exit code says."""
        text = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        # By a person, or for want of memory. A crash (SIGSEGV) would come again.
        return cls(text, -code in (signal.SIGKILL, signal.SIGTERM))


class Handle(NamedTuple):
    """A process of a job, or of several, that was started.

    Args:
        is_done: says whether it has ended; what became of its jobs stands in their folders.
        stop: asks it to end.
        ending: returns how it ended, for a job that left no summary.
    """

    is_done: Callable[[], bool]
    stop: Callable[[], object]
    ending: Callable[[], Ending]


# Starts a process for the jobs of some folders, each with its job.json; it has the worker's variables, too.
Launcher = Callable[[Sequence[Path], Mapping[str, str]], Handle]


def _local(folders: Sequence[Path], environment: Mapping[str, str]) -> Handle:
    child = start_process(folders, environment, MODULE)
    stdin = child.stdin
    assert stdin is not None

    def is_done() -> bool:
        if child.poll() is None:
            return False
        stdin.close()
        return True

    def stop() -> None:
        # It has just ended, or was seen to have ended before.
        with suppress(OSError, ValueError):
            stdin.write(STOP)
            stdin.flush()

    return Handle(is_done, stop, lambda: Ending.of(child.returncode))


def _slurm(folder: Path, options: Mapping[str, Any]) -> Launcher:
    """Return what starts one SLURM job for each group of jobs, by submitit.

    Args:
        folder: takes submitit's files.
        options: submitit's parameters (`timeout_min`, `slurm_partition`, `gpus_per_node`); `cluster` is `slurm`, or
            `local` for processes of this machine.
    """
    submitit = import_extra("submitit", "sweep.launcher=slurm", "slurm")
    parameters = {"timeout_min": 24 * 60, **options}
    cluster = parameters.pop("cluster", "slurm")
    with _options_refused(options, "SLURM on this machine and submitit's parameters, or {cluster: local}"):
        executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=cluster)
        executor.update_parameters(**parameters)

    def start(folders: Sequence[Path], environment: Mapping[str, str]) -> Handle:
        job = executor.submit(run_process, [*map(str, folders)], dict(environment), MODULE)

        def ending() -> Ending:
            text = f"SLURM job {job.job_id} ended as {job.state}; see {job.paths.stderr}"
            return Ending(text, str(job.state).startswith(_SLURM_KILLS))

        return Handle(job.done, job.cancel, ending)

    return start


def _ray(options: Mapping[str, Any]) -> Launcher:
    """Return what starts one Ray task for each group of jobs.

    Args:
        options: of `ray.remote` (`num_cpus`, `num_gpus`); `address` is that of a cluster, or `local` for this machine.
    """
    ray = import_extra("ray", "sweep.launcher=ray", "ray")
    parameters = {"num_cpus": 1, **options}
    address = parameters.pop("address", "local")
    with _options_refused(options, "the options of ray.remote, and the address of a cluster that answers"):
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        task = ray.remote(max_retries=0, **parameters)(run_process)

    def start(folders: Sequence[Path], environment: Mapping[str, str]) -> Handle:
        job = task.remote([*map(str, folders)], dict(environment), MODULE)

        def ending() -> Ending:
            try:
                return Ending.of(ray.get(job))
            except Exception as error:
                # Of a machine that is gone there is no exit code.
                return Ending(f"its Ray task ended with {type(error).__name__}", was_killed=True)

        return Handle(lambda: bool(ray.wait([job], timeout=0)[0]), lambda: ray.cancel(job, force=True), ending)

    return start


@contextmanager
def _options_refused(options: Mapping[str, Any], expected: str) -> Iterator[None]:
    """Turn the errors of a cluster's package into a ConfigError."""
    try:
        yield
    except (ConnectionError, RuntimeError, TypeError, NameError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"sweep.launcher_options: found {dict(options)} ({reason}); expected {expected}. Correct them."
        ) from error


def make_launcher(name: str, folder: Path, options: Mapping[str, Any]) -> Launcher:
    """Return the launcher that `sweep.launcher` names.

    Raises:
        ConfigError: its package is missing, or does not take the options.
    """
    if name == "slurm":
        return _slurm(folder, options)
    if name == "ray":
        return _ray(options)
    if options:
        raise ConfigError(
            f"sweep.launcher_options: found {dict(options)} with sweep.launcher=local, which has none. Leave them out."
        )
    return _local


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


def run_jobs(
    points: AbstractPoints,
    launcher: Launcher,
    workers: list[dict[str, str]],
    folder: Path,
    spec: JobSpec,
    announce: Callable[[Point, JobOutcome], None],
    when_begins: Callable[[Group], None] | None = None,
) -> None:
    """Run the jobs that `points` gives, each in a folder of its own; one that fails does not end the others.

    Args:
        points: gives them, those of one process at a time.
        launcher: starts the processes.
        workers: the environment of each worker, of which each runs one process at a time.
        folder: of the sweep.
        spec: of its jobs, without what differs between them.
        announce: called with each job that has ended.
        when_begins: called with each group that is about to begin; None where nobody wants to know.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the jobs have ended.
    """
    running: dict[int, _Running] = {}
    try:
        while True:
            for worker in range(len(workers)):
                group = points.next() if worker not in running else None
                if group is not None:
                    if when_begins is not None and group.trained:
                        when_begins(replace(group, points=group.trained))
                    running[worker] = _begin(group, folder, spec, launcher, workers[worker])
            if not running:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for worker, process in list(running.items()):
                # Asked first: what a process writes before its end is then seen below.
                is_done = process.handle is None or process.handle.is_done()
                for point, outcome in process.ended(is_done=is_done):
                    points.finish(point, outcome)
                    announce(point, outcome)
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
    handle: Handle | None

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
        status, advice = (INTERRUPTED, " It can be resumed with resume=auto.") if ending.was_killed else ("failed", "")
        error = (
            f"The job left no summary: {ending.text}. Read {job_folder.log_of(list(self.folders.values()))}.{advice}"
        )
        note_failure(folder, self.words[number], error, status)
        return read_outcome(folder)


def _begin(group: Group, folder: Path, spec: JobSpec, launcher: Launcher, environment: dict[str, str]) -> _Running:
    folders = {point.number: folder / str(point.number) for point in group.points}
    words = {point.number: (*spec.words, *point.words) for point in group.points}
    for point in group.points:
        prepare = job_folder.write_job if point.number in group.ended else job_folder.begin_job
        prepare(folders[point.number], replace(spec, words=words[point.number], study=point.study))
        if point.refused is not None:
            note_failure(folders[point.number], words[point.number], point.refused, INFEASIBLE)
    begun = [folders[point.number] for point in group.trained]
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
    is_limited = num_workers > 1 and "OMP_NUM_THREADS" not in environment
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers))} if is_limited else {}
    return [{**threads, **({VARIABLE: ",".join(share)} if share else {})} for share in shares]


def _stop(handles: list[Handle]) -> None:
    for handle in handles:
        handle.stop()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not all(handle.is_done() for handle in handles):
        time.sleep(SECONDS_BETWEEN_LOOKS)
