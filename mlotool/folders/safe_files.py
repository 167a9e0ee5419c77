"""The files of a run's or a sweep's folder, which may be a stranger's: every one is found, read and written here.

The folder itself may be reached by a link, for the user has named it. Below it no link is followed that leads out of
it, nothing but regular files is opened (a pipe would hang), and no file is read that is larger than its kind has to be.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlotool.core.errors import RunFileError
from mlotool.core.messages import escape
from mlotool.folders import files

# Of recipe.yaml, overrides.txt, and the error's text in a summary.
MAX_TEXT_BYTES = 100_000

# Of config.yaml: a recipe with all that it inherits written out.
MAX_CONFIG_BYTES = 400_000

MAX_JSON_BYTES = 2_000_000
# Of metrics.csv, which is read line by line, and not all of it.
MAX_METRICS_BYTES = 2_000_000_000

# Age of a temporary file that no process writes any more: it was killed.
_LEFT_BEHIND_S = 60.0

_MAX_DIGITS = 18

# W&B links the log of its own process, in its cache, into each run's folder, and never writes there by that name.
_WANDB_LINK = re.compile(r"(?:.*/)?wandb/[^/]+/logs/debug-core\.log")
_WANDB_LOG = re.compile(r".*/core-debug-[\w.-]+\.log")


def located(root: Path, name: str | Path) -> Path:
    """Return where a file of a folder lies, with links followed; it need not exist.

    Args:
        root: the folder.
        name: of the file, relative to it.

    Raises:
        RunFileError: a link leads out of the folder.
    """
    home, place = os.path.realpath(root), os.path.realpath(root / name)
    if os.path.commonpath((home, place)) != home:
        raise RunFileError(
            f"{_shown(root / name)}: found a link that leads out of its folder, or a file behind such a link; expected "
            f"files in {_shown(root)}, as this folder may be anybody's. Replace the link by a copy."
        )
    return Path(place)


def open_file(root: Path, name: str | Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of a folder for reading.

    Raises:
        RunFileError: a link leads out of the folder, it is no regular file, it is too large or cannot be read.
        FileNotFoundError: there is none.
    """
    path, shown = located(root, name), _shown(root / name)
    try:
        _check_regular(path.lstat(), shown)
        # No link by now, and should it have become a pipe, it does not hang.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(path, flags), "rb")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{shown} does not exist") from None
    except OSError as error:
        said = f"{shown}: cannot be read ({error.strerror})"
        raise RunFileError(f"{said}; expected a readable file. Change its permissions.") from error
    with ExitStack() as stack:
        stack.callback(file.close)
        status = os.fstat(file.fileno())
        _check_regular(status, shown)
        if status.st_size > max_bytes:
            raise RunFileError(f"{shown}: found {status.st_size} bytes; expected at most {max_bytes}. Remove it.")
        stack.pop_all()
    return file


def read_text(root: Path, name: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """Return the text of a file of a folder, what is no UTF-8 replaced; None where there is none.

    Raises:
        RunFileError: it is not taken, as in `open_file`.
    """
    try:
        with open_file(root, name, max_bytes) as file:
            return file.read(max_bytes).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None


def read_json(root: Path, name: str | Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """Return the mapping of a JSON file of a folder; None where there is none.

    Numbers that are not finite are None, as JSON has none, and whole ones of many digits are floats.

    Raises:
        RunFileError: it is not taken, as in `open_file`, or holds no mapping.
    """
    text, shown = read_text(root, name, max_bytes), _shown(root / name)
    if text is None:
        return None
    try:
        content = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RunFileError(
            f"{shown}: found something else than a JSON object; expected the file as the run wrote it. Remove it."
        )
    return content


def list_files(root: Path, folder: str, suffix: str, max_files: int) -> list[str]:
    """Return the names of a folder's files that end in `suffix`, relative to `root`, in order; at most `max_files`.

    Raises:
        RunFileError: the folder is behind a link that leads out of `root`.
    """
    try:
        with os.scandir(located(root, folder)) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(suffix) and not entry.is_dir())
    except OSError:
        return []
    return [f"{folder}/{name}" for name in names[:max_files]]


@contextmanager
def replacing(root: Path, name: str | Path) -> Iterator[Path]:
    """Yield a temporary file that takes the place of a file of the folder; its own folder is made where it is missing.

    Raises:
        RunFileError: its folder is behind a link that leads out of `root`.
        WriteError: it cannot be written.
    """
    folder = make_folder(root, Path(name).parent)
    files.remove_temporary(folder, Path(name).name, _LEFT_BEHIND_S)
    with files.replacing(folder / Path(name).name, is_durable=False) as temporary:
        yield temporary


def write_text(root: Path, name: str | Path, text: str) -> Path:
    """Write a text file of a folder whole or not at all, letters that UTF-8 lacks as XML's escapes; return its path."""
    return write_bytes(root, name, text.encode("utf-8", errors="xmlcharrefreplace"))


def write_bytes(root: Path, name: str | Path, content: bytes) -> Path:
    """Write a file of a folder whole or not at all; return its path."""
    with replacing(root, name) as temporary:
        temporary.write_bytes(content)
    return root / name


def make_folder(root: Path, name: str | Path) -> Path:
    """Make a folder below `root`, where there is none yet; return where it lies."""
    folder = located(root, name)
    with files.writing(root / name):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_tree(root: Path) -> None:
    """Refuse a folder that is to be written to where anything below it leads out of it, or is no file and no folder.

    What is written later, by W&B and TensorBoard too, then stays inside. W&B's link to the log of its own process may
    lead out.

    Raises:
        RunFileError: with the first such.
    """

    def refuse(error: OSError) -> None:
        raise files.cannot_write(root, error) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        for path in (Path(folder, name) for name in (*folders, *names)):
            if path.is_symlink():
                if not _is_wandb_link(root, path):
                    located(root, path.relative_to(root))
            elif not path.is_dir():
                _check_regular(path.lstat(), _shown(path))


def _is_wandb_link(root: Path, path: Path) -> bool:
    is_named_so = _WANDB_LINK.fullmatch(path.relative_to(root).as_posix()) is not None
    return is_named_so and _WANDB_LOG.fullmatch(path.readlink().as_posix()) is not None


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = stat.filemode(status.st_mode)
        raise RunFileError(f"{path}: found a special file ({kind}); expected a regular file. Remove it.")


def _whole(digits: str) -> int | float | None:
    return int(digits) if len(digits) <= _MAX_DIGITS else _finite(digits)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _shown(path: Path) -> str:
    return escape(str(path))
