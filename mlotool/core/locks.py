"""Whether another process holds a file or folder; it is asked without waiting and without writing."""

import os
import stat
from pathlib import Path


def is_held(path: Path) -> bool:
    """Say whether a process holds an exclusive lock (flock) on a regular file or folder; false where that is not known.

    Example:
        >>> is_held(Path("no-such-folder"))
        False
    """
    try:
        import fcntl

        # Not through links, and not waiting for who opens the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (ImportError, OSError):  # Windows has no fcntl
        return False
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
