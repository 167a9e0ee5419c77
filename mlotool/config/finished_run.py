"""A finished run that another one takes something of: its folder may be a stranger's."""

from pathlib import Path
from typing import Any

from mlotool.config.run_config import read_run_config
from mlotool.config.run_length import read_summary
from mlotool.core.errors import ConfigError

_RUN = "the folder of a finished run, outputs/<name>/<date>_<time>"


def finished_run(key: str, folder: Path) -> dict[str, Any]:
    """Return the config of a run that has finished, as plain values.

    Args:
        key: of the config that names the folder.
        folder: the run's.

    Raises:
        ConfigError: there is no such folder, it is no run's, or the run has not finished.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{key}: found '{folder}', which {found}; expected {_RUN}. Correct the path.")
    document = read_run_config(folder)
    if document is None or not isinstance(document.data.get("problems"), dict):
        raise ConfigError(
            f"{key}: found '{folder}', which has no config.yaml of a run; expected {_RUN}. Give the folder that "
            "`mlotool run` printed."
        )
    status = read_summary(folder).get("status")
    if status != "finished":
        shown = status if status in ("pruned", "failed", "infeasible", "interrupted") else "not finished"
        raise ConfigError(
            f"{key}: found '{folder}', a run that is {shown}; expected one that has finished. Go on with it first: the "
            f"same command with resume={folder}."
        )
    return document.data


def folder_of(path: Path) -> Path:
    """Return the run folder that a path names: itself, or that of a checkpoint."""
    is_checkpoint = path.is_file() and path.suffix == ".ckpt" and path.parent.name == "checkpoints"
    return path.parent.parent if is_checkpoint else path
