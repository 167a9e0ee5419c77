"""The process itself: its large imports, SIGTERM as an exception, its memory and its end."""

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from types import FrameType, ModuleType
from typing import NoReturn
from weakref import WeakSet

from mlotool.core.errors import Interrupted
from mlotool.core.messages import escape

# How long threads may go on once all is done.
SECONDS_TO_END = 5.0


def end_with_threads(exit_code: int) -> None:
    """See that this process ends, though code of the user's may have left threads that do not.

    Python is left to wait for them, since it first tells those of a `ThreadPoolExecutor` to end. A thread that waits
    beside it ends the process where that takes too long.

    Args:
        exit_code: of the process.
    """
    if _lasting():
        threading.Thread(target=_end, args=(exit_code,), name="mlotool_end", daemon=True).start()


def _end(exit_code: int) -> None:
    time.sleep(SECONDS_TO_END)
    names = ", ".join(f"'{thread.name}'" for thread in _lasting())
    if not names:
        # Python has gone on to its exit: what takes long is none of theirs.
        return
    fault = f"mlotool: warning: found the threads {names} {SECONDS_TO_END:g} s after everything else has ended"
    text = f"{fault}; expected your code to end its threads. They were stopped; start them with daemon=True."
    say = partial(print, escape(text), file=sys.stderr)
    # Whatever these may do, the process ends.
    for call in (say, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with suppress(Exception):
            call()
    os._exit(exit_code)


def _lasting() -> list[threading.Thread]:
    """Return the threads that Python waits for."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def leave(exit_code: int) -> NoReturn:
    """End this process as Python does: wait for threads, call what waits for the exit, write what is buffered.

    Modules and what they hold are left to the system, which saves the seconds that Python takes to free them.
    """
    end_with_threads(exit_code)
    threading._shutdown()  # type: ignore[attr-defined]
    _files.update(_open_files())
    atexit._run_exitfuncs()
    # Of files that code of the user's has not closed.
    for file in list(_files):
        with suppress(Exception):
            file.flush()
    os._exit(exit_code)


_files: WeakSet[io.IOBase] = WeakSet()


def _open_files() -> list[io.IOBase]:
    """Return the files among the objects that are not frozen."""
    values = gc.get_objects()
    # Each type is asked once, and not io.IOBase itself: abstract classes are slow to answer.
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, io.IOBase.__mro__[1])}
    return [value for value in values if type(value) in kinds]


def import_large(name: str) -> ModuleType:
    """Import a module without looking for garbage meanwhile, or, afterwards, among what came with it.

    Python looks through all objects again and again while they become more, which is a fifth of the time that torch and
    Lightning take; what modules hold stays to the end of the process.
    """
    if name in sys.modules:
        return sys.modules[name]
    _files.update(_open_files())
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        module = import_module(name)
    finally:
        if was_enabled:
            gc.enable()
    freeze()
    # Python's end wants to find all objects: extensions take those that it does not find for lost, and print so.
    atexit.register(gc.unfreeze)
    return module


_is_frozen = False


def freeze() -> None:
    """Leave what there is now out of the collector's walks, to the end of the process."""
    global _is_frozen
    gc.freeze()
    # Python counts what is frozen one by one, which takes tens of milliseconds.
    _is_frozen = True


@contextmanager
def frozen() -> Iterator[None]:
    """Leave what there is now out of the collector's walks meanwhile.

    The modules of torch, Lightning and Hydra hold half a million objects; going through them each time that the
    collected steps of a window look like garbage costs several percent of a run of small ticks.
    """
    global _is_frozen
    if _is_frozen:
        yield
        return
    freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _is_frozen = False


def import_torch(*, with_wandb: bool) -> None:
    """Import torch, and before it what W&B imports when a run begins.

    pydantic looks for the source of each class of W&B's launch package among all modules that there are: that takes
    four times as long once there are torch's.

    Args:
        with_wandb: whether a run of this process will log to W&B.
    """
    if with_wandb:
        # W&B goes on without it as well.
        with suppress(ImportError):
            import_large("wandb.sdk.launch")
    import_large("torch")


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, so that what is to be written at the end is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
