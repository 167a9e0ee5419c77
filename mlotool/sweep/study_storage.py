"""The database of a study, and Optuna itself, which is imported where it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlotool.core.errors import ConfigError, WriteError
from mlotool.sweep.extras import import_extra

# Workers write at the same time; SQLite waits this long for another one's lock.
SECONDS_TO_LOCK = 60


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
    arguments = {"connect_args": {"timeout": SECONDS_TO_LOCK}} if url.startswith("sqlite:") else {}
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
