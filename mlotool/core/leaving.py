"""The end of a process that has imported torch: without taking all modules apart, which takes a second."""

import atexit
import gc
import io
import os
import threading
from contextlib import suppress
from typing import NoReturn

from mlotool.core.threads import end_with_threads


def leave(exit_code: int) -> NoReturn:
    """End this process as Python does: wait for threads, call what waits for the exit, write what is buffered.

    Modules and what they hold are left to the system.
    """
    end_with_threads(exit_code)
    # As Python's own end, and that of its multiprocessing, do.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Of files that code of the user's has not closed.
    gc.unfreeze()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):
                each.flush()
    os._exit(exit_code)
