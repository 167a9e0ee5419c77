"""What a recipe itself sets: its own keys, those of the recipes that it inherits and of the options that it chooses."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlotool.config.completion_keys import Files, merged, read_files
from mlotool.config.defaults import full_address
from mlotool.config.paths import GROUP
from mlotool.config.replacement import dropped_places, without
from mlotool.config.schema import GROUPS, OPTION_GROUPS

_KEY = re.compile(r"\+{0,2}(?P<key>[\w.]+)=.*", re.DOTALL)
# No run can be understood without them, whoever has chosen them.
_ALWAYS = ("name", "data")


def set_values(config: Mapping[str, Any], words: Sequence[str], folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the part of a resolved config that its recipe and overrides set, and its data.

    Args:
        config: plain, with every reference resolved.
        words: the recipe as `+recipe=NAME`, and the overrides.
        folders: where recipes are looked for first.

    Raises:
        ConfigError: a file that is not there.
    """
    files = read_files(words, folders)
    keys = _keys(files)
    for word in words:
        match = _KEY.fullmatch(word)
        if match and match["key"] not in GROUPS:
            _add(keys, match["key"].split("."))
    always = (*_ALWAYS, *(["hypergradient"] if config["graph"]["lower_to_upper"] else []))
    for key in always:
        keys.setdefault(key, None)
    found: dict[str, Any] = _part(config, keys)
    return found


def chosen_options(words: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Return what a command line and its recipe choose, as they would be written: `hypergradient=cg`.

    Example:
        >>> chosen_options(["+recipe=learned_lr"])[:2]
        ['data=digits', 'hypergradient=unrolled']
    """
    files = read_files(words, folders)
    found: dict[str, str] = {}
    for path, package in reversed(files.paths):
        group, _, option = path.partition("/")
        # An option may inherit another one, which comes before it.
        if group in OPTION_GROUPS and not _is_default(files, full_address(f"{group}@{package}")):
            found[group if package == group else f"{group}@{package}"] = option
    return [f"{address}={option}" for address, option in found.items()]


def inherited_recipes(words: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Return the recipes below the named one, the nearest first."""
    names = [path.partition("/")[2] for path, _ in read_files(words, folders).paths if path.startswith(f"{GROUP}/")]
    return names[1:]


def _keys(files: Files) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    layers = files.found[::-1]
    for layer, places in zip(layers, dropped_places(layers, files.typed), strict=True):
        if layer.choice is None or not _is_default(files, layer.choice):
            keys = merged(keys, without(layer.content, places))
    return keys


def _is_default(files: Files, address: str) -> bool:
    """Say whether an option is conf/config.yaml's, which nobody has chosen."""
    return address in {full_address(group) for group in OPTION_GROUPS} and address not in files.choices


def _add(keys: dict[str, Any], path: Sequence[str]) -> None:
    for part in path[:-1]:
        child = keys.setdefault(part, {})
        if not isinstance(child, dict):
            return
        keys = child
    keys[path[-1]] = None


def _part(value: Any, keys: Any) -> Any:
    """Return what `keys` has of a tree; where it names no keys, all."""
    if not isinstance(value, dict) or not isinstance(keys, dict):
        return value
    return {key: _part(child, keys[key]) for key, child in value.items() if key in keys}
