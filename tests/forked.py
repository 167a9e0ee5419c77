"""Processes that begin with torch, Lightning and mlotool imported: forked from a server that has imported them.

Importing them takes a process seconds, and what a test lets it do less than one. All workers of pytest have one server,
that of `multiprocessing`. A forked process has a folder, an environment and files of its own, as one that is started
by `subprocess`; what it does is a function of a module. Processes that it starts itself are forked by the same server.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver, reduction
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

from mlotool.sweep.driver import open_log

IMPORTED = [f"mlotool.{name}" for name in ("cli.main", "cli.sweep_job", "runner.run_config", "report")]
IMPORTED += ["sklearn.datasets", "optuna", "sqlalchemy.orm", "alembic.command"]
CONTEXT = multiprocessing.get_context("forkserver")
SERVER: Any = forkserver._forkserver
ADDRESS = "MLOTOOL_TESTS_SERVER"
"""Of the environment: where the process that has started pytest's workers has started a server for them."""


class Forked:
    """A process that was started, with the methods of `subprocess.Popen` that tests and the launcher use."""

    def __init__(self, process: Any, stdin: BinaryIO | None) -> None:
        self._process, self.pid, self.stdin = process, process.pid, stdin

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Say whether a process of any kind is still there, and no zombie."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except OSError:
        return False


class Descriptor:
    """The descriptor of a file, which a process is given as a number when it begins."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return methodcaller("detach"), (reduction.DupFd(self.number),)


def start(
    function: Callable[..., object],
    *arguments: Any,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: tuple[int, int] = (1, 2),
    has_stdin: bool = False,
    is_session: bool = False,
) -> Forked:
    """Begin a function in a process of its own.

    Args:
        function: of a module, by whose names it is found; what it returns is the exit code, None is 0.
        arguments: its own; they are pickled.
        folder: the working directory; None is this process's, as of its environment.
        environment: its variables.
        output: the descriptors of the files that take standard output and errors.
        has_stdin: whether its standard input is a pipe, of which this process has the other end.
        is_session: whether it leads a session of its own.
    """
    reader, stdin = os.open(os.devnull, os.O_RDONLY), None
    if has_stdin:
        os.close(reader)
        reader, writer = os.pipe()
        stdin = os.fdopen(writer, "wb", buffering=0)
    request = {
        "call": (function.__module__, function.__qualname__, arguments),
        "folder": str(folder or Path.cwd()),
        "environment": dict(os.environ if environment is None else environment),
        "path": list(sys.path),
        "is_session": is_session,
        "server": address(),
    }
    process = CONTEXT.Process(target=_be, args=(request, [Descriptor(number) for number in (reader, *output)]))
    process.start()
    os.close(reader)
    return Forked(process, stdin)


def address() -> str:
    """Return the address of the server, which starts where it is asked for first."""
    if ADDRESS in os.environ:
        _use(os.environ[ADDRESS])
        return os.environ[ADDRESS]
    # What is forked computes with as many threads as the server, which has imported torch.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path):
        CONTEXT.set_forkserver_preload(IMPORTED)
        SERVER.ensure_running()
    found: str = SERVER._forkserver_address
    return found


def _use(server: str) -> None:
    """Let a server that another process has started fork what this one starts."""
    SERVER._forkserver_address, SERVER.ensure_running = server, lambda: None
    if SERVER._forkserver_alive_fd is None:
        # Handed on with each request; the one that keeps the server is its starter's.
        SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)


def command(
    *words: str, folder: Path, environment: Mapping[str, str] | None = None, output: tuple[int, int] = (1, 2)
) -> Forked:
    """Begin `mlotool WORDS`, the ranks of whose runs and the jobs of whose sweeps are forked as well."""
    return start(call_mlotool, words, folder=folder, environment=environment, output=output)


def start_rank(folder: Path, rank: int, shared: Mapping[str, str]) -> Forked:
    """Begin a rank of a run: what `mlotool.runner.run_config._start` does, but for a new interpreter."""
    environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with Path(os.devnull).open("w") as nowhere:
        output, own = (nowhere.fileno() if rank else 1, 2), dict[str, Any](has_stdin=True, is_session=True)
        return start(call_mlotool, ("rank", str(folder)), environment=environment, output=output, **own)


def start_job(folders: Sequence[Path], environment: Mapping[str, str], module: str) -> Forked:
    """Begin jobs of a sweep: what `mlotool.sweep.driver.start_process` does, but for a new interpreter."""
    job = import_module(module).main
    with open_log(folders) as log:
        output, own = (log.fileno(), log.fileno()), dict[str, Any](has_stdin=True, is_session=True)
        return start(job, folders, environment={**os.environ, **environment}, output=output, **own)


def run(
    function: Callable[..., object], *arguments: Any, folder: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Let a function end in a process of its own, within two minutes; return its exit code and what it has printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        output = (out.fileno(), err.fileno())
        process = start(function, *arguments, folder=folder, environment=environment, output=output)
        try:
            code = process.wait(timeout=120)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(function.__name__, code, out.read(), err.read())


def call_mlotool(words: tuple[str, ...]) -> int:
    """Be `mlotool WORDS`; its ranks and jobs are forked."""
    from mlotool.cli.main import main
    from mlotool.runner import run_config
    from mlotool.sweep import driver

    run_config._start = start_rank  # type: ignore[assignment]
    driver.start_process = start_job  # type: ignore[assignment]
    sys.argv = ["mlotool", *words]
    return main()


def _be(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become the process of a request, and end with it."""
    code: object = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # What it starts itself is forked by the server that has forked it.
        _use(request["server"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        if request["is_session"]:
            os.setsid()
        module, name, arguments = request["call"]
        code = getattr(import_module(module), name)(*arguments)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # As Python ends: threads and what is registered for the exit, and then whatever that has left.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
