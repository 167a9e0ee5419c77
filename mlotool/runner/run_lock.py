"""One process a run folder: two that write the same metrics.csv would spoil it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A killed run's data loaders need some seconds to notice, and hold what it held.
PATIENCE_S = 8.0


@contextmanager
def run_lock(folder: Path, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a folder, and yield whether it could be had; the system gives it back however the process ends.

    Args:
        folder: the run folder.
        patience_s: how long to wait for it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    give_up_at = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    yield False
                    return
                time.sleep(0.1)
                continue
            except OSError:  # a file system without locks
                pass
            yield True
            return
    finally:
        os.close(descriptor)
