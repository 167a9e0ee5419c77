"""Threads that outlast the command: Python waits for them at its exit, for ever where they have no end."""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress

from mlotool.core.escape import escape

SECONDS_TO_END = 5.0
"""How long threads may go on once all is done."""


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
    text = (
        f"mlotool: warning: all is done, and still running {SECONDS_TO_END:g} s later: the threads {names}, which "
        "mlotool did not start; ended with them. Let your code end its threads, or start them with daemon=True."
    )
    # Whatever these may do, the process ends.
    with suppress(Exception):
        print(escape(text), file=sys.stderr)
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _lasting() -> list[threading.Thread]:
    """Return the threads that Python waits for."""
    main = threading.main_thread()
    return [each for each in threading.enumerate() if not each.daemon and each is not main]
