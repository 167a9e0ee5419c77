"""Optuna, imported where it is asked for, and the database of a study, which may be a stranger's."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError, WriteError


def import_extra(module: str, key: str, extra: str) -> Any:
    """Import a package that an extra of ours brings.

    Args:
        module: its name.
        key: the setting that wants it, as it was written.
        extra: of `pip install mlotool[..]`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: the package {error.name} is not installed; expected the extra '{extra}'. Run: "
            f"pip install 'mlotool[{extra}]'"
        ) from error


def import_optuna() -> Any:
    """Return the package, which says nothing below a warning; a missing one is a ConfigError."""
    optuna = import_extra("optuna", "sweep=optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(url: str) -> Any:
    """Open the database of a study.

    Raises:
        ConfigError: it does not open.
    """
    optuna = import_optuna()
    # Workers write at the same time: SQLite waits so many seconds for another one's lock.
    arguments = {"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=arguments)
    # SQLAlchemy's errors have no common base but this, and a driver that is missing is an ImportError.
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"sweep.storage: found '{url}', which does not open ({reason}); expected a database such as "
            "sqlite:////folder/study.db or postgresql://host/name. Correct it, or leave it out."
        ) from error


@contextmanager
def storing(url: str) -> Iterator[None]:
    """Turn the errors of a study's database, of which a full disk is one, into a WriteError."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise WriteError(
            f"sweep.storage: the database {url} does not take what the study holds ({str(cause).partition(chr(10))[0]})"
            "; expected room on its disk, and that it answers. Free some space there, then go on with the sweep: the "
            "same command with resume=auto."
        ) from error


def check_own_study(folder: Path, name: str, sampler: str) -> None:
    """Refuse a study in a sweep's folder, which may be a stranger's, whose sampler reads pickles."""
    if sampler == "cmaes" and (folder / name).exists():
        # Optuna keeps the state of CMA-ES as a pickle in the study, and unpickles whatever stands there.
        raise ConfigError(
            f"resume: found a study in {folder} with sweep.sampler=cmaes, whose state is a pickle, which can run any "
            "code; expected another sampler, or your word that the study is yours: "
            f"sweep.storage=sqlite:///{(folder / name).absolute()}"
        )
