"""From a recipe's name and overrides to one config, by Hydra's public interface."""

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config.chosen_decisions import FOLDER_KEY, fill_decisions
from mlotool.config.chosen_decisions import KEY as DECISIONS
from mlotool.config.defaults import choices_in, full_address, key_faults
from mlotool.config.hydra_errors import config_errors
from mlotool.config.options import check_name, check_placed, option_file, read_option
from mlotool.config.paths import GROUP, SUFFIX, package_dir
from mlotool.config.provenance import Origin
from mlotool.config.reading import read_document
from mlotool.config.recipes import find_recipe, recipe_argument
from mlotool.config.safety import check_recipe_file
from mlotool.config.schema import OPTION_GROUPS
from mlotool.config.schema_faults import check_overrides
from mlotool.config.sources import loaded_recipes, sources
from mlotool.config.trusted import trust_all
from mlotool.core.arguments import is_path, require, require_texts, shown
from mlotool.core.errors import ConfigError

CONFIG_NAME = "config"
# Hydra 1.3 warns without it, 1.4 with it.
VERSION_KEYWORDS: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
_TARGET = "_target_"
_OPEN = ("evaluate", "graph", "analyses", DECISIONS)
"""Nodes with keys that have their names from users."""

_origins: dict[int, Origin] = {}


def compose(
    recipe: str | os.PathLike[str] | None, overrides: Sequence[str] = (), *, trust: Sequence[str] = ()
) -> DictConfig:
    """Compose a config with Hydra: built-in defaults, then the recipe, then the overrides.

    Args:
        recipe: a recipe's name, or the path of its file; None where an override `+recipe=..` names it, or none is
            wanted.
        overrides: as on the command line.
        trust: packages of yours that the recipe may name, from now on in this process; found in the working directory
            or on the import path.

    Returns:
        The config; interpolations are resolved where they are read.

    Raises:
        ConfigError: it cannot be composed, or there is no such package. `check` finds what is wrong with its values.

    Example:
        >>> compose("mwn", ["hypergradient=cg", "seed=1"]).seed
        1
    """
    recipe = os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe
    _check_kinds(recipe, overrides, trust)
    trust_all(trust)
    check_overrides(overrides)
    argument, folders = recipe_argument(recipe)
    path = _recipe_path(recipe, overrides, folders)
    with sources(folders):
        if path is not None:
            check_recipe_file(path)
    with sources(folders):
        config = compose_words([*argument, *overrides])
        choices = config.hydra.runtime.choices
        with open_dict(config):
            del config["hydra"]
        finish(config, choices, overrides)
    _keep_origin(config, Origin(_call(recipe, overrides, trust), tuple(overrides), path))
    return config


def _check_kinds(recipe: Any, overrides: Any, trust: Any) -> None:
    if not isinstance(recipe, str | None):
        raise ConfigError(
            f"compose.recipe: found {shown(recipe)}; expected a name, such as 'mwn', or the path of a file. Write "
            "compose('mwn')."
        )
    require_texts("compose.overrides", overrides, "seed=1")
    require_texts("compose.trust", trust, "mymodels")


def check_composed(config: Any) -> None:
    """Refuse what is no composed config: a recipe's name, plain dicts, a part of one.

    Raises:
        ConfigError: it is none.
    """
    advice = "Write mlotool.run(mlotool.compose('mwn'))."
    if is_path(config):
        advice = f"Write mlotool.run(mlotool.compose({os.fspath(config)!r}))."
    elif isinstance(config, Mapping):
        advice = (
            "Write what differs from a recipe as overrides, mlotool.run(mlotool.compose('mwn', ['seed=1'])), or all of "
            "it as a recipe file, mlotool.run(mlotool.compose('mine.yaml'))."
        )
    is_whole = isinstance(config, DictConfig) and "runner" in config
    require(is_whole, "run.config", config, "a config that mlotool.compose has returned", advice)


def compose_words(words: Sequence[str]) -> DictConfig:
    """Return what Hydra composes of a command line, with its own node `hydra`; recipes must be registered."""
    with config_errors(words=words), initialize_config_dir(str(package_dir("conf")), **VERSION_KEYWORDS):
        return hydra_compose(CONFIG_NAME, hydra_words(words), return_hydra_config=True)


def hydra_words(words: Sequence[str]) -> list[str]:
    """Return overrides as Hydra's grammar wants them.

    A node that is written out, and keys with names from users, are new to Hydra, which wants pluses for them. A folder
    in the place of decisions has a key of its own.

    Raises:
        ConfigError: an option is chosen for a place outside of the config.
    """
    parsed = OverridesParser.create().parse_overrides(list(words))
    faults = [
        fault
        for each in parsed
        if each.package is not None and each.key_or_group in OPTION_GROUPS
        for fault in key_faults(each.input_line or "", each.key_or_group, each.package)
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return [_hydra_word(each, word) for each, word in zip(parsed, words, strict=True)]


def _hydra_word(override: Override, word: str) -> str:
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    first, _, rest = override.key_or_group.partition(".")
    if override.type != OverrideType.CHANGE:
        return word
    if (first, rest) == (DECISIONS, "") and isinstance(value, str):
        return f"{FOLDER_KEY}={word.partition('=')[2]}"
    is_node = any(isinstance(each, dict) and (_TARGET in each or first in _OPEN) for each in values)
    return f"++{word}" if is_node or (first == DECISIONS and rest) else word


def finish(config: DictConfig, choices: Mapping[str, Any], words: Sequence[str]) -> None:
    """Check the options that a composed config chooses, and fill in decisions of a folder, in place.

    Args:
        config: as Hydra has composed it, without its own node.
        choices: `hydra.runtime.choices`: by address `group@package`, the options.
        words: the overrides.

    Raises:
        ConfigError: an option is not what it is called, or a recipe writes out a node beside it.
    """
    for address, chosen in choices.items():
        if str(address).partition("@")[0] in OPTION_GROUPS and isinstance(chosen, str):
            place = full_address(str(address))
            option, package = _option(place, chosen), place.partition("@")[2]
            if not any(word.lstrip("+").startswith((f"{package}={{", f"{package}.{_TARGET}=")) for word in words):
                _check_target(config, package, f"{address}={chosen}", option)
    for address, options in _lists(words):
        for each in options:
            _option(address, each)
    fill_decisions(config)


def _lists(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the addresses of which overrides and recipes choose several options at once: Hydra does not list them."""
    for each in OverridesParser.create().parse_overrides(list(words)):
        value = None if each.is_sweep_override() else each.value()
        if isinstance(value, list) and each.key_or_group in OPTION_GROUPS:
            yield full_address(each.get_key_element().lstrip("+~")), list(map(str, value))
    for recipe in loaded_recipes():
        for word in ("", "override"):
            yield from choices_in(recipe.data.get("defaults"), word)


def _option(address: str, name: str) -> dict[Any, Any]:
    """Return what an option sets, once it has been held to the rules for recipes where it is of the user's."""
    group, _, package = address.partition("@")
    built_in = package_dir("conf") / group / f"{name}{SUFFIX}"
    if built_in.is_file():
        check_name(group, name)
        return read_document(built_in).data
    own = option_file(group, name) if group in OPTION_GROUPS else None
    if own is None:
        return {}
    content = read_option(group, own).data
    placed: Any = content
    for part in reversed(package.split(".")):
        placed = {part: placed}
    check_placed(own, placed)
    return content


def _check_target(config: DictConfig, package: str, choice: str, option: Mapping[Any, Any]) -> None:
    """Refuse a choice whose target is not that of its node: a recipe writes the node out, and their keys are merged."""
    target = option.get(_TARGET)
    found = OmegaConf.select(config, f"{package}.{_TARGET}", throw_on_resolution_failure=False)
    if target is not None and found is not None and found != target:
        raise ConfigError(
            f"{package}: found the target {found} beside the choice {choice}, which is {target}; expected one of them, "
            "as their keys are merged. Leave the choice out, or remove the node that the recipe writes out; a recipe "
            f"chooses no option by `- override /{choice.partition('=')[0]}: null` in its defaults list."
        )


def origin_of(config: Any) -> Origin | None:
    """Return where a config that `compose` made came from; None for any other, a copy of one too."""
    return _origins.get(id(config))


def _keep_origin(config: DictConfig, origin: Origin) -> None:
    # By identity, not in a WeakKeyDictionary: a DictConfig's hash is that of its values, which may be changed.
    _origins[id(config)] = origin
    weakref.finalize(config, _origins.pop, id(config), None)


def _call(recipe: str | None, overrides: Sequence[str], trust: Sequence[str]) -> str:
    trusting = f", trust={list(trust)!r}" if trust else ""
    return f"mlotool.run(mlotool.compose({recipe!r}, {list(overrides)!r}{trusting}))"


def _recipe_path(recipe: str | None, overrides: Sequence[str], folders: Sequence[Path]) -> Path | None:
    if recipe is not None:
        return folders[0] / Path(recipe).name if folders else find_recipe(recipe)
    names = [word.partition("=")[2].strip("'\"") for word in overrides if word.lstrip("+").startswith(f"{GROUP}=")]
    if names:
        # Several, in a list, are no one file, and null is none.
        with suppress(ConfigError):
            return find_recipe(names[-1])
    return None


def plain(node: Any) -> Any:
    """Return a config as dicts, lists and scalars, with every interpolation resolved."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
