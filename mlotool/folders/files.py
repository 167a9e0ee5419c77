"""Files that are there whole or not at all, whenever the process ends; what is said where a disk refuses one; locks."""

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from mlotool.core.errors import WriteError
from mlotool.core.messages import escape

_SUFFIX = ".tmp"
_FULL = ("room for it", "Free some space, or choose another disk.")
_TAKEN = ("a place for it", "Rename or remove what is there.")
_EXPECTED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR, errno.EISDIR), _TAKEN),
    errno.ENOENT: ("the folder that was there before", "Put it back, or start again in another folder."),
}


@cache
def package_dir(name: str) -> Path:
    """Return the folder of the built-in `conf` or `recipes`.

    Args:
        name: "conf" or "recipes". In a wheel they lie inside the package, in a checkout beside it.
    """
    package = Path(__file__).resolve().parents[1]
    return next((home / name for home in (package, package.parent) if (home / name).is_dir()), package / name)


def at_home(path: Path | str) -> Path:
    """Return a path with `~` resolved; that of a user who is not known stays as it is, where nothing lies."""
    # Path.expanduser raises there.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def cannot_write(path: Path | str, error: OSError) -> WriteError:
    """Return what to raise where the disk does not take a file or folder: what was found, expected, and what to do."""
    expected, advice = _EXPECTED.get(error.errno or 0, ("a place that can be written to", "Change it."))
    is_named = isinstance(error.filename, str) and not error.filename.endswith(_SUFFIX)
    place = Path(str(error.filename) if is_named else path)
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        # The system names the last one, which may be far below the file that stands in the way.
        place = next((p for p in (*reversed(place.parents), place) if p.exists() and not p.is_dir()), place)
    said = f"cannot be written ({error.strerror or error})"
    return WriteError(f"{escape(str(place))}: {said}; expected {expected}. {advice}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors of what is inside, which writes `path`, into a WriteError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise cannot_write(path, error) from error


@contextmanager
def replacing(path: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """Yield a temporary file beside `path`, which takes its place once it is written and on the disk.

    A link of that name is replaced too, not followed.

    Args:
        path: the file.
        is_durable: whether to wait until it is on the disk; needless for what can be made again.

    Raises:
        WriteError: the disk is full, or does not take it; what was there stays.

    Example::

        with replacing(run_dir / "summary.json") as temporary:
            temporary.write_text(text)
    """
    # In the same folder: a file can take another one's place at once only within one file system. Its name cannot be
    # guessed, and it is made here: nobody has put a link there.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{_SUFFIX}")
    try:
        with writing(path):
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            yield temporary
            if is_durable:
                sync(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    # What a folder lists is on the disk only then; not every system lets one open a folder.
    if is_durable:
        with suppress(OSError):
            sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file, or leave the one that was there."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary(folder: Path, name: str = "*", older_than_s: float = 0.0) -> None:
    """Remove what a process that was killed while it wrote has left in a folder.

    Args:
        folder: where to look.
        name: of the files that were written; all by default.
        older_than_s: how long nothing may have been written to them, where another process may be at work.
    """
    for path in folder.glob(f".{name}.*{_SUFFIX}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime >= older_than_s:
                path.unlink()


@contextmanager
def lock(path: Path, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a file or folder (flock), and yield whether it could be had; the system gives it back at the process's end.

    Args:
        path: of it, which is there.
        patience_s: how long to wait for it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    descriptor = os.open(path, os.O_RDONLY)
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
