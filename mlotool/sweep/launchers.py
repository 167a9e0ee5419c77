"""Where a sweep's jobs run: processes of this machine, SLURM, or Ray."""

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlotool.core.errors import ConfigError
from mlotool.core.files import writing
from mlotool.sweep.job_folder import log_of
from mlotool.sweep.storage import import_extra

MODULE = "mlotool.cli.sweep_job"
"""What `python -m` runs in a process of jobs."""
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
    path = log_of(folders)
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


class AbstractHandle(ABC):
    """A process of a job, or of several, that was started."""

    @abstractmethod
    def is_done(self) -> bool:
        """Say whether it has ended; what became of its jobs stands in their folders."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to end."""

    @abstractmethod
    def ending(self) -> "Ending":
        """Return how it ended, for a job that left no summary."""


Launcher = Callable[[Sequence[Path], Mapping[str, str]], AbstractHandle]
"""Starts a process for the jobs of some folders, each with its job.json; it has the worker's variables, too."""


class _ProcessHandle(AbstractHandle):
    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._process, self._stdin = child, child.stdin

    def is_done(self) -> bool:
        if self._process.poll() is None:
            return False
        assert self._stdin is not None
        self._stdin.close()
        return True

    def stop(self) -> None:
        assert self._stdin is not None
        # It has just ended, or was seen to have ended before.
        with suppress(OSError, ValueError):
            self._stdin.write(STOP)
            self._stdin.flush()

    def ending(self) -> Ending:
        return Ending.of(self._process.returncode)


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
    return lambda folders, environment: _SlurmHandle(
        executor.submit(run_process, [*map(str, folders)], dict(environment), MODULE)
    )


class _SlurmHandle(AbstractHandle):
    def __init__(self, job: Any) -> None:
        self._job = job

    def is_done(self) -> bool:
        return bool(self._job.done())

    def stop(self) -> None:
        self._job.cancel()

    def ending(self) -> Ending:
        text = f"SLURM job {self._job.job_id} ended as {self._job.state}; see {self._job.paths.stderr}"
        return Ending(text, str(self._job.state).startswith(_SLURM_KILLS))


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
    return lambda folders, environment: _RayHandle(ray, task.remote([*map(str, folders)], dict(environment), MODULE))


class _RayHandle(AbstractHandle):
    def __init__(self, ray: Any, task: Any) -> None:
        self._ray, self._task = ray, task

    def is_done(self) -> bool:
        return bool(self._ray.wait([self._task], timeout=0)[0])

    def stop(self) -> None:
        self._ray.cancel(self._task, force=True)

    def ending(self) -> Ending:
        try:
            return Ending.of(self._ray.get(self._task))
        except Exception as error:
            # Of a machine that is gone there is no exit code.
            return Ending(f"its Ray task ended with {type(error).__name__}", was_killed=True)


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
            f"sweep.launcher_options: found {dict(options)} with sweep.launcher=local, which has none; expected "
            "sweep.launcher=slurm or ray. Choose one, or leave the options out."
        )
    return lambda folders, environment: _ProcessHandle(start_process(folders, environment, MODULE))
