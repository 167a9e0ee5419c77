"""Processes that begin with torch, Lightning and mlotool imported: forked from a server that has imported them.

Importing them takes a process seconds, and what a test lets it do less than one. Each worker of pytest has one server,
which starts with the first process that is asked of it and ends with the worker. A forked process has a folder, an
environment and files of its own, as one that is started by `subprocess`; what it does is a function of a module.
"""

import atexit
import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from mlotool.sweep.driver import open_log

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "mlotool.cli.main",
    "mlotool.cli.sweep_job",
    "mlotool.runner",
    "mlotool.runner.run_config",
    "sklearn.datasets",
)
NUMBER = struct.Struct("q")

_address: str | None = None
"""Of the server; a forked process knows it as well, and may have others forked."""


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that tests and the launcher use.

    Args:
        channel: gives the process's id, and its exit code once it has ended.
        stdin: the other end of its standard input, or None where it has none.
    """

    def __init__(self, channel: socket.socket, stdin: BinaryIO | None) -> None:
        self._channel = channel
        [self.pid] = NUMBER.unpack(channel.recv(NUMBER.size, socket.MSG_WAITALL))
        self.stdin = stdin
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, minus the signal where one has killed it; raise as Popen does."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                [self.returncode] = NUMBER.unpack(self._channel.recv(NUMBER.size, socket.MSG_WAITALL))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("forked", timeout or 0.0) from None
            self._channel.close()
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


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
        folder: the working directory; None is this process's.
        environment: None is this process's.
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
    }
    content = pickle.dumps(request)
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(_server())
        socket.send_fds(channel, [NUMBER.pack(len(content))], [reader, *output])
        channel.sendall(content)
    finally:
        os.close(reader)
    return Forked(channel, stdin)


def command(
    *words: str, folder: Path, environment: Mapping[str, str] | None = None, output: tuple[int, int] = (1, 2)
) -> Forked:
    """Begin `mlotool WORDS`, the ranks of whose runs and the jobs of whose sweeps are forked as well."""
    return start(call_mlotool, words, folder=folder, environment=environment, output=output)


def start_rank(folder: Path, rank: int, shared: Mapping[str, str]) -> Forked:
    """Begin a rank of a run: what `mlotool.runner.run_config._start` does, but for a new interpreter."""
    with Path(os.devnull).open("w") as nowhere:
        return start(
            call_mlotool,
            ("rank", str(folder)),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            output=(nowhere.fileno() if rank else 1, 2),
            has_stdin=True,
            is_session=True,
        )


def start_job(folders: Sequence[Path], environment: Mapping[str, str], module: str) -> Forked:
    """Begin jobs of a sweep: what `mlotool.sweep.driver.start_process` does, but for a new interpreter."""
    job = import_module(module).main
    with open_log(folders) as log:
        return start(
            job,
            folders,
            environment={**os.environ, **environment},
            output=(log.fileno(), log.fileno()),
            has_stdin=True,
            is_session=True,
        )


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


def _server() -> str:
    """Return the address of the server of this process, and start it if there is none."""
    global _address
    if _address is None:
        folder = tempfile.TemporaryDirectory(prefix="mlotool_tests_")
        address = str(Path(folder.name) / "server")
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        server = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests import forked; forked.serve(sys.argv[1])", address],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A terminal's Ctrl-C is for pytest, which ends it.
            start_new_session=True,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        server.stdout.close()
        _address = address
        atexit.register(_end, server, folder)
    return _address


def _end(server: "subprocess.Popen[bytes]", folder: "tempfile.TemporaryDirectory[str]") -> None:
    server.stdin.close()  # type: ignore[union-attr]
    server.wait()
    folder.cleanup()


def serve(address: str) -> None:
    """Fork a process for each that connects, until standard input ends."""
    global _address
    for name in IMPORTED:
        import_module(name)
    # What is forked would wait for locks that another thread has held.
    assert threading.active_count() == 1
    gc.freeze()
    _address = address
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([0, listener], [], [])[0]:
            channel, _ = listener.accept()
            if not os.fork():
                listener.close()
                _watch(channel)
            channel.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    os._exit(0)


def _watch(channel: socket.socket) -> None:
    """Let a process do what is requested, and tell its end; the process that watches does nothing else."""
    size, descriptors, *_ = socket.recv_fds(channel, NUMBER.size, 3)
    content = channel.recv(NUMBER.unpack(size)[0], socket.MSG_WAITALL)
    process = os.fork()
    if not process:
        channel.close()
        _be(pickle.loads(content), descriptors)
    for each in (0, 1, 2, *descriptors):
        os.close(each)
    # Who asked may be gone.
    with contextlib.suppress(BrokenPipeError):
        channel.sendall(NUMBER.pack(process))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        channel.sendall(NUMBER.pack(code))
    os._exit(0)


def _be(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become the process of a request, and end with it."""
    code: object = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
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
