"""The config.yaml of a run folder, which may be a stranger's: read as a recipe is, and held to a recipe's values."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import yaml

from mlotool.config.reading import Document, leaves, parse_document
from mlotool.config.references import place_faults
from mlotool.config.safety import is_dangerous
from mlotool.core.errors import ConfigError
from mlotool.core.run_files import MAX_CONFIG_BYTES, read_text
from mlotool.core.suggest import did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
