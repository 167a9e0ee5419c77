"""Files that are there whole or not at all, whenever the process ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, which takes its place once it is written and on the disk.

    Example::

        with replacing(run_dir / "summary.json") as temporary:
            temporary.write_text(text)
    """
    # In the same folder: a file can take another one's place at once only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # What a folder lists is on the disk only then; not every system lets one open a folder.
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


def remove_temporary(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left in a folder."""
    for path in folder.glob(f".*{_SUFFIX}"):
        path.unlink(missing_ok=True)
