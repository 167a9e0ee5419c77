"""The database of a study in a sweep's folder, which may be a stranger's: looked at before Optuna opens it."""

import sqlite3
from pathlib import Path

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.messages import escape
from mlotool.core.run_files import open_file

MAX_BYTES = 200_000_000
_SUFFIXES = ("-journal", "-wal", "-shm")
SECONDS_TO_LOCK = 60.0
"""So long a process of before, which is about to end, may hold it."""

_NAMES_ANOTHER_FILE = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
"""SQLite's mark at the end of a journal that names another file, which it would read, and remove. Every journal begins
with it."""


def check_own_study(folder: Path, name: str, sampler: str) -> None:
    """Refuse a study in a sweep's folder, which may be a stranger's, where reading it could do harm.

    Raises:
        ConfigError: its sampler reads pickles.
        RunFileError: it holds more than Optuna's tables.
    """
    check_study_file(folder, name)
    if sampler == "cmaes" and (folder / name).exists():
        # Optuna keeps the state of CMA-ES as a pickle in the study, and unpickles whatever stands there.
        url = f"sqlite:///{(folder / name).absolute()}"
        raise ConfigError(
            f"resume: found a study in {folder} with sweep.sampler=cmaes, whose state is a pickle, which can run any "
            "code, while the folder may be anybody's; expected another sampler, or your word that the study is yours. "
            f"If it is, say where it is: sweep.storage={url}"
        )


def check_study_file(folder: Path, name: str) -> None:
    """Refuse a database that holds more than Optuna's tables; nothing is done where there is none.

    Raises:
        RunFileError: with what it holds.
    """
    for each in (name, *(f"{name}{suffix}" for suffix in _SUFFIXES)):
        try:
            with open_file(folder, each, MAX_BYTES) as file:
                if each.endswith("-journal") and file.read().endswith(_NAMES_ANOTHER_FILE):
                    raise _refused(folder / each, "a journal that names another file")
        except FileNotFoundError:
            continue
    if (folder / name).is_file():
        _check_schema(folder / name)


def _check_schema(path: Path) -> None:
    """Refuse views and triggers, which compute when they are read, for as long as they like, and virtual tables."""
    try:
        # What a process that was killed has half written is taken back here: it is the rest that counts.
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=SECONDS_TO_LOCK)
        try:
            rows = connection.execute("SELECT type, substr(sql, 1, 30) FROM sqlite_master LIMIT 1000").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _refused(path, f"what is no database ({error})") from error
    for kind, sql in rows:
        if kind not in ("table", "index") or (kind == "table" and "VIRTUAL" in str(sql).upper().split()):
            raise _refused(path, f"a {escape(str(kind))[:40]} beside the tables")


def _refused(path: Path, found: str) -> RunFileError:
    return RunFileError(
        f"{escape(str(path))}: found {found}; expected a study as Optuna writes it. Remove the sweep's folder, or "
        "leave resume out for a new sweep."
    )
