"""What a recipe itself sets: its own keys, those of the recipes that it inherits and of the options that it chooses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlotool.config.composition import compose_words
from mlotool.config.defaults import choices_in, full_address
from mlotool.config.options import TARGET_GROUPS, option_file
from mlotool.config.paths import SUFFIX, package_dir
from mlotool.config.reading import read_document
from mlotool.config.schema import GROUPS, OPTION_GROUPS
from mlotool.config.sources import loaded_recipes, sources

_KEY = re.compile(r"\+{0,2}(?P<key>[\w.]+)=.*", re.DOTALL)
_CHOICE = re.compile(r"\+?(?P<address>\w+(@[\w.]+)?)=.*", re.DOTALL)
# No run can be understood without them, whoever has chosen them.
_ALWAYS = ("name", "data")


@dataclass(frozen=True)
class SetParts:
    """What a recipe and overrides are made of.

    Args:
        inherited: the recipes below the named one, the nearest first.
        options: what they choose, as it would be written: `hypergradient=cg`.
        keys: a tree of what they set; a leaf stands for all that is below it.
    """

    inherited: list[str]
    options: list[str]
    keys: dict[str, Any]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a resolved config that they set, and its data.

        Args:
            config: plain, with every reference resolved.
        """
        always = (*_ALWAYS, *(["hypergradient"] if config["graph"]["lower_to_upper"] else []))
        found: dict[str, Any] = _part(config, {**dict.fromkeys(always), **self.keys})
        return found


def set_parts(words: Sequence[str], folders: Sequence[Path] = ()) -> SetParts:
    """Return what a command line and its recipe set.

    Args:
        words: the recipe as `+recipe=NAME`, and the overrides.
        folders: where recipes are looked for first.

    Raises:
        ConfigError: they do not compose.

    Example:
        >>> set_parts(["+recipe=learned_lr"]).options[:2]
        ['data=digits', 'hypergradient=unrolled']
    """
    with sources(folders):
        choices = compose_words(words).hydra.runtime.choices
        recipes = loaded_recipes()
    named = {full_address(match["address"]) for match in map(_CHOICE.fullmatch, words) if match}
    for recipe in recipes:
        entries = recipe.data.get("defaults")
        named |= {address for word in ("", "override") for address, _ in choices_in(entries, word)}
    keys: dict[str, Any] = {}
    for recipe in reversed(recipes):
        for key in recipe.data.keys() - {"defaults", "hydra"}:
            keys[key] = _merged(keys.get(key), recipe.data[key]) if key in keys else recipe.data[key]
    options = []
    for address, name in reversed(choices.items()):
        group, _, package = str(address).partition("@")
        # A default of conf/config.yaml is nobody's choice.
        if group in OPTION_GROUPS and isinstance(name, str) and full_address(str(address)) in named:
            options.append(f"{address}={name}")
            _add_option(keys, (package or group).split("."), group, name)
    for match in filter(None, map(_KEY.fullmatch, words)):
        if match["key"] not in GROUPS:
            _add(keys, match["key"].split("."))
    return SetParts([recipe.path.stem for recipe in recipes[1:]], options, keys)


def _add_option(keys: dict[str, Any], path: Sequence[str], group: str, name: str) -> None:
    if group in TARGET_GROUPS:
        _add(keys, path)
        return
    built_in = package_dir("conf") / group / f"{name}{SUFFIX}"
    file = built_in if built_in.is_file() else option_file(group, name)
    for key in () if file is None else read_document(file).data:
        if key != "defaults":
            _add(keys, [*path, key])


def _merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merged(below[key], above[key]) if key in below else above[key] for key in above}
    return above


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
