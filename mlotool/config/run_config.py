"""The config.yaml of a run folder, which may be a stranger's: read as a recipe is, and held to a recipe's values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import yaml

from mlotool.config.objective import objective_direction
from mlotool.config.reading import Document, leaves, parse_document
from mlotool.config.safety import is_dangerous, place_faults
from mlotool.config.schema import defaults_at
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.run_files import MAX_CONFIG_BYTES, read_json, read_text

if TYPE_CHECKING:
    from omegaconf import DictConfig


def max_ticks(config: Mapping[str, Any]) -> int:
    """Return the last tick of a plain config.

    Example:
        >>> max_ticks({"runner": {"max_ticks": 100}, "debug": {"limit_ticks": 20}})
        20
    """
    limit = (config.get("debug") or {}).get("limit_ticks")
    ticks: int = config["runner"]["max_ticks"]
    return ticks if limit is None else min(ticks, limit)


def has_finished(summary: Mapping[str, Any], old: Mapping[str, Any], last_tick: int) -> bool:
    """Say whether a run has nothing left to do.

    Args:
        summary: its summary.json.
        old: its config, as a plain one.
        last_tick: until where it is wanted.
    """
    if summary.get("status") != "finished":
        return False
    num_ticks = summary.get("num_ticks")
    if not isinstance(num_ticks, int):
        return False
    has_stopped_early = num_ticks < max_ticks(old)
    return has_stopped_early or num_ticks >= last_tick


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json; empty where there is none.

    Raises:
        RunFileError: it is none that a run wrote.
    """
    return read_json(run_dir, "summary.json") or {}


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


FILE = "config.yaml"
BUILT = ("data", "problems", "hypergradient", "analyses", "evaluate")
"""What `evaluate` and `load` build from."""

MAX_FAULTS = 20
MAX_WRITTEN = 60
"""Characters of a list that a message has."""


def read_run_config(run_dir: Path) -> Document | None:
    """Return config.yaml of a run folder; None where there is none.

    Raises:
        ConfigError: it is behind a link that leads out of the folder, or larger, deeper or stranger than a config.
    """
    text = read_text(run_dir, FILE, MAX_CONFIG_BYTES)
    return None if text is None else parse_document(run_dir / FILE, text, is_fast=True)


def load_run_config(
    run_dir: Path | str, overrides: Sequence[str] = (), *, is_own: bool = False, built: Sequence[str] = BUILT
) -> "DictConfig":
    """Return the config of a run folder.

    The folder may be a stranger's: what a recipe may not say, a place outside of the working folder or
    `download: true`, is refused here too, until the user says the same, or another value, as an override.

    Args:
        run_dir: the run folder.
        overrides: `key=value` for keys of the config, such as `data.root=/data`; a list is replaced whole.
        is_own: whether the values are the user's, for a parent process has written the folder, or nothing is built.
        built: the keys that something is built from; what others say does nothing.

    Raises:
        ConfigError: there is no config.yaml, it is none of ours, or it says what only the user may say.
    """
    # Imported here: the report reads configs too, and needs no Hydra.
    from omegaconf import DictConfig, OmegaConf

    from mlotool.config.hydra_errors import config_errors
    from mlotool.config.schema import Config

    path = Path(run_dir) / FILE
    document = read_run_config(Path(run_dir))
    if document is None:
        raise ConfigError(
            f"'{run_dir}' has no config.yaml; expected the folder of a run, outputs/<name>/<date>_<time>. "
            "Give the folder that `mlotool run` printed."
        )
    if not document.data:
        raise ConfigError(f"{path}: found an empty file; expected the config that the run wrote. Put it back.")
    for key, value in leaves(document.data):
        if isinstance(value, str) and "${" in value:
            # Every reference was resolved when it was written; what looks like one now was put there.
            raise ConfigError(
                f"{path}: {key}: found {value!r}; expected plain values, as a run writes them. Write the value."
            )
    said = dict(_override(path, document.data, word) for word in overrides)
    faults = [] if is_own else [f"{path}: {fault}" for fault in _faults(document.data, said, built)]
    if faults:
        more = [f"... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise ConfigError("\n".join([*faults[:MAX_FAULTS], *more]))
    with config_errors(path):
        config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(document.data))
        for key, value in said.items():
            OmegaConf.update(config, key, value, merge=False)
    assert isinstance(config, DictConfig)
    return config


def _faults(data: dict[Any, Any], said: dict[str, Any], built: Sequence[str]) -> Iterator[str]:
    """Yield what the config says and only the user may: the run folder may be anybody's."""
    for key, value in leaves({name: data[name] for name in built if name in data}):
        # A list that was replaced has none of its old values.
        if key in said or any(key.startswith(f"{each}[") for each in said):
            continue
        fault = next(place_faults(key, value), None) if isinstance(value, str) else None
        if fault is not None or is_dangerous(key, value):
            what = "a path below the working folder" if fault else "nothing that downloads, unpickles or chooses files"
            text = str(value).lower() if isinstance(value, bool) else value
            yield (
                f"{key}: found {value!r}; expected {what}, since a run folder may be anybody's. If it is as you want "
                f"it, say so: {key}={text} behind the run folder (Python: overrides=['{key}={text}'])."
            )


def _override(path: Path, data: dict[Any, Any], word: str) -> tuple[str, Any]:
    key, sign, text = word.partition("=")
    lists = dict(_lists(data))
    known = [*(each for each, _ in leaves(data)), *lists]
    if not sign or key not in known:
        raise ConfigError(
            f"found the override '{word}'; expected <key>=<value> with a key that {path} has."
            f"{did_you_mean(key, known)} Correct it."
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if key not in lists:
        return key, value if isinstance(value, str | int | float | bool | None) else text
    plain = (str, int, float, bool, NoneType)
    if not isinstance(value, list) or not all(isinstance(each, plain) for _, each in leaves(value)):
        written = json.dumps(lists[key], default=str)
        raise ConfigError(
            f"found the override '{word}'; expected a list of plain values, since {path} has {key}: "
            f"{written[:MAX_WRITTEN]}. Write '{key}=[..]'."
        )
    return key, value


def _lists(node: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists of a tree with their dotted keys."""
    if isinstance(node, list):
        yield prefix, node
        for index, each in enumerate(node):
            yield from _lists(each, f"{prefix}[{index}]")
    elif isinstance(node, dict):
        for key, each in node.items():
            yield from _lists(each, f"{prefix}.{key}" if prefix else str(key))


MAY_DIFFER = (
    "resume",
    "decisions_from",
    "runner.max_ticks",
    "runner.checkpoint_seconds",
    "runner.keep_checkpoints",
    "runner.progress_bar",
    "runner.report",
    "logger.*",
    "debug.limit_ticks",
    "problems.*.stream.num_workers",
)
"""What a resumed run may change: how long it goes on, what is kept and shown. None of it changes a tick."""

_ABSENT = "nothing"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys, with both values, in which two plain configs differ; those of MAY_DIFFER aside.

    A key that only one of them has counts with the schema's default in the other: an older version wrote fewer.

    Example:
        >>> differences({"seed": 0, "runner": {"max_ticks": 5}}, {"seed": 1, "runner": {"max_ticks": 9}})
        ['seed: 0 there, 1 here']
    """
    before, now = ({**dict(_leaves(each)), **_direction(each)} for each in (old, new))
    found = []
    for key in sorted({*before, *now}):
        if may_differ(key):
            continue
        a, b = (_value(side, key) for side in (before, now))
        if a != b or type(a) is not type(b):
            found.append(f"{key}: {a!r} there, {b!r} here")
    return found


def may_differ(key: str) -> bool:
    """Say whether a resumed run may have another value at a dotted key."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER)


def _direction(config: Mapping[str, Any]) -> dict[str, Any]:
    # Older versions wrote out what is derived now.
    return {"objective_mode": objective_direction(config)}


def _value(leaves: Mapping[str, Any], key: str) -> Any:
    if key in leaves:
        return leaves[key]
    parent, _, name = key.rpartition(".")
    return defaults_at(parent).get(name, _ABSENT)


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node
