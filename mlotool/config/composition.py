"""From a recipe's name and overrides to one config, by Hydra's public interface."""

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mlotool.config import recipes
from mlotool.config.hydra_errors import config_errors
from mlotool.config.provenance import Origin
from mlotool.config.recipes import GROUP
from mlotool.config.run_config import DECISIONS_KEY, FOLDER_KEY, fill_decisions
from mlotool.config.schema import GROUPS, MAX_NAME, OPTION_GROUPS, boolean_faults, is_boolean, name_fault
from mlotool.config.security import safety
from mlotool.config.security.trusted import trust_all
from mlotool.config.sources import loaded_recipes, sources
from mlotool.config.user_data import TELLING, fill_data
from mlotool.core.arguments import require, require_texts
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.folders import hub
from mlotool.folders.documents import ends, read_document

CONFIG_NAME = "config"
# Hydra 1.3 warns without it, 1.4 with it.
VERSION_KEYWORDS: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
_TARGET = "_target_"
# Nodes with keys that have their names from users.
_OPEN = ("evaluate", "graph", "analyses", DECISIONS_KEY)
# By split and domain of the user's.
_SHARES = "data.shares."

_origins: dict[int, Origin] = {}


def compose(
    recipe: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    trust: Sequence[str] = (),
    allow_hub: bool = False,
) -> DictConfig:
    """Compose a config with Hydra: built-in defaults, then the recipe, then the overrides.

    Args:
        recipe: a recipe's name, or the path of its file; None if an override `+recipe=..` names the recipe, or to
            compose a config without one.
        overrides: `key=value` settings, as on the command line.
        trust: names of your own packages, in the working directory or on the import path, whose code recipes may name
            from now on in this process.
        allow_hub: whether recipes may name models and tokenizers on the Hugging Face Hub, which are then downloaded,
            from now on in this process.

    Returns:
        The config; interpolations (`${...}`) are resolved when a value is read.

    Raises:
        ConfigError: the config cannot be composed, or there is no such package. The values are checked later, by
            `mlotool.run`.

    Example:
        >>> compose("mwn", ["hypergradient=cg", "seed=1"]).seed
        1
    """
    recipe = os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe
    wanted = "a name, such as 'mwn', or the path of a file"
    require(isinstance(recipe, str | None), "compose.recipe", recipe, wanted, "Write compose('mwn').")
    require_texts("compose.overrides", overrides, "seed=1")
    require_texts("compose.trust", trust, "mymodels")
    trust_all(trust)
    if allow_hub:
        hub.allow_hub()
    argument, folders = recipes.recipe_argument(recipe)
    path = _recipe_path(recipe, overrides, folders)
    with sources(folders):
        if path is not None:
            safety.check_recipe_file(path)
        config = compose_words([*argument, *overrides])
        choices = config.hydra.runtime.choices
        with open_dict(config):
            del config["hydra"]
        finish(config, choices, overrides)
    trusting = (f", trust={list(trust)!r}" if trust else "") + (", allow_hub=True" if allow_hub else "")
    call = f"mlotool.run(mlotool.compose({recipe!r}, {list(overrides)!r}{trusting}))"
    # By identity, not in a WeakKeyDictionary: a DictConfig's hash is that of its values, which may be changed.
    _origins[id(config)] = Origin(call, tuple(overrides), path)
    weakref.finalize(config, _origins.pop, id(config), None)
    return config


def check_composed(config: Any) -> None:
    """Refuse what is no composed config: a recipe's name, plain dicts, a part of one.

    Raises:
        ConfigError: it is none.
    """
    advice = "Write mlotool.run(mlotool.compose('mwn', ['seed=1'])), or compose('mine.yaml')."
    is_whole = isinstance(config, DictConfig) and "runner" in config
    require(is_whole, "run.config", config, "a config that mlotool.compose has returned", advice)


def compose_words(words: Sequence[str]) -> DictConfig:
    """Return what Hydra composes of a command line, with its own node `hydra`; recipes must be registered."""
    with config_errors(words=words), initialize_config_dir(str(recipes.package_dir("conf")), **VERSION_KEYWORDS):
        return hydra_compose(CONFIG_NAME, hydra_words(words), return_hydra_config=True)


def hydra_words(words: Sequence[str]) -> list[str]:
    """Return overrides as Hydra's grammar wants them, without those that `finish` sets.

    A node that is written out, and keys with names from users, are new to Hydra, which wants pluses for them. A folder
    in the place of decisions has a key of its own.

    Raises:
        ConfigError: an option is chosen for a place outside of the config.
    """
    overrides = _parsed(tuple(words))
    faults = [fault for override in overrides for fault in _override_faults(override)]
    if faults:
        raise ConfigError("\n".join(faults))
    searched = [override.value() for override in overrides if override.key_or_group == "hydra.searchpath"]
    folders = [str(folder) for value in searched if isinstance(value, list) for folder in value]
    recipes.command_line_folders[:] = [Path(folder.removeprefix("file://")) for folder in folders]
    return [_hydra_word(override) for override in overrides if not _is_later(override)]


def _override_faults(override: Override) -> Iterator[str]:
    """Yield what is wrong with an override that Hydra or OmegaConf take, or fail at without saying where."""
    key, value = override.key_or_group, override.value()
    if override.package is not None and key in OPTION_GROUPS:
        yield from safety.key_faults(override.input_line or "", key, override.package)
    names = value if isinstance(value, list) else [value]
    is_choice = key in GROUPS and not override.is_sweep_override() and not override.is_delete()
    if is_choice and not isinstance(value, dict) and not all(isinstance(name, str) for name in names):
        yield f"{override.input_line}: expected the name of an option, as in data=digits. Write one, or leave it out."
    # Hydra makes the folder of a run before its name is checked.
    if key == "name" and isinstance(value, str) and len(value) > MAX_NAME and "$" not in value:
        yield str(name_fault(value))
    for choice in value.list if isinstance(value, ChoiceSweep) else [value]:
        yield from boolean_faults(key, choice)


def is_sweep(word: str) -> bool:
    """Say whether an override stands for several values."""
    with config_errors():
        return _parsed((word,))[0].is_sweep_override()


def later_words(words: Sequence[str]) -> list[str]:
    """Return the overrides that `finish` sets: keys of nodes that may be null, into which Hydra cannot merge."""
    return [override.input_line or "" for override in _parsed(tuple(words)) if _is_later(override)]


@lru_cache(maxsize=64)
def _parsed(words: tuple[str, ...]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(words))


def _is_later(override: Override) -> bool:
    path = override.key_or_group.split(".")
    depth = 1 if path[0] == "evaluate" else 3 if path[0] == "problems" and path[2:3] == ["stream"] else 0
    if not depth or override.is_delete() or override.is_sweep_override() or override.package is not None:
        return False
    return len(path) > depth or isinstance(override.value(), dict)


def _hydra_word(override: Override) -> str:
    word, value = override.input_line or "", override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    first, _, rest = override.key_or_group.partition(".")
    if override.type != OverrideType.CHANGE:
        return word
    if (first, rest) == (DECISIONS_KEY, "") and all(isinstance(item, str | QuotedString) for item in values):
        return f"{FOLDER_KEY}={word.partition('=')[2]}"
    is_node = any(isinstance(item, dict) and (_TARGET in item or first in _OPEN) for item in values)
    is_named = (first == DECISIONS_KEY and rest) or f"{override.key_or_group}.".startswith(_SHARES)
    return f"++{word}" if is_node or is_named else word


def finish(config: DictConfig, choices: Mapping[str, Any], words: Sequence[str]) -> None:
    """Set what Hydra cannot, check the options that a composed config chooses, and fill in what folders and data tell.

    Args:
        config: as Hydra has composed it, without its own node; changed in place.
        choices: `hydra.runtime.choices`: by address `group@package`, the options.
        words: the overrides.

    Raises:
        ConfigError: an option is not what it is called, or a recipe writes out a node beside it.
    """
    for override in filter(_is_later, _parsed(tuple(words))):
        first, *rest = path = override.key_or_group.split(".")
        if first == "problems" and rest[0] not in config.problems:
            hint = did_you_mean(rest[0], map(str, config.problems))
            raise ConfigError(f"problems.{rest[0]}: there is no such problem.{hint} Correct {override.input_line}.")
        with config_errors(words=[override.input_line or ""]), open_dict(config):
            config.merge_with(_tree(path, override.value()))
    for address, chosen in choices.items():
        if str(address).partition("@")[0] in OPTION_GROUPS and isinstance(chosen, str):
            place = safety.full_address(str(address))
            option, package = _option(place, chosen), place.partition("@")[2]
            if not any(word.lstrip("+").startswith((f"{package}={{", f"{package}.{_TARGET}=")) for word in words):
                _check_target(config, package, f"{address}={chosen}", option)
    for address, names in _lists(words):
        for name in names:
            _option(address, name)
    fill_decisions(config)
    with config_errors():
        fill_data(config)
    for key, source in hub.names_in(OmegaConf.to_container(config, resolve=False)) if hub.is_allowed() else ():
        # The same files wherever the run goes on, or is evaluated.
        OmegaConf.update(config, key, hub.pinned(key, source))


def with_values(config: DictConfig, words: Sequence[str]) -> DictConfig | None:
    """Return a copy of a composed config with other values; None where an override does more than set numbers or text.

    Jobs of a sweep that differ in such values alone need no composition of their own, which takes Hydra 0.2 s.

    Args:
        config: as `compose` returns it.
        words: overrides.
    """
    copied = deepcopy(config)
    for override in _parsed(tuple(words)):
        key, value = override.key_or_group, override.value()
        items = value if isinstance(value, list) else [value]
        is_value = all(isinstance(item, int | float | str) for item in items) and "${" not in str(value)
        is_value = is_value and not (is_boolean(key) and not isinstance(value, bool))
        above, _, name = key.rpartition(".")
        is_free = key not in GROUPS and key.partition(".")[0] not in (DECISIONS_KEY, FOLDER_KEY, "hydra")
        is_free = is_free and name not in hub.KEYS
        # What the data tell may depend on it.
        is_free = is_free and not (key.startswith("data.") and config.data.get(_TARGET) == TELLING)
        node = OmegaConf.select(copied, above, throw_on_resolution_failure=False) if above else copied
        is_there = OmegaConf.is_dict(node) and name in node and not name.startswith("_")
        is_leaf = is_there and not OmegaConf.is_dict(OmegaConf.select(node, name, throw_on_resolution_failure=False))
        is_change = override.type == OverrideType.CHANGE and override.package is None
        if not (is_change and is_value and is_free and is_leaf):
            return None
        try:
            OmegaConf.update(copied, key, value)
        except OmegaConfBaseException:
            # Hydra says what is wrong.
            return None
    return copied


def key_of(word: str) -> str:
    """Return the place that an override sets."""
    return word.partition("=")[0].lstrip("+~").rpartition("@")[2]


def is_apart(words: Sequence[str], place: int) -> bool:
    """Say whether no other override sets the same key as one of them, or one above or below it: their order counts."""
    key = f"{key_of(words[place])}."
    others = [f"{key_of(word)}." for word in (*words[:place], *words[place + 1 :])]
    return not any(key.startswith(other) or other.startswith(key) for other in others)


def _tree(path: Sequence[str], value: Any) -> Any:
    return reduce(lambda below, part: {part: below}, reversed(path), value)


def _lists(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the addresses of which overrides and recipes choose several options at once: Hydra does not list them."""
    for override in _parsed(tuple(words)):
        value = None if override.is_sweep_override() else override.value()
        if isinstance(value, list) and override.key_or_group in OPTION_GROUPS:
            yield _address(override), list(map(str, value))
    for recipe in loaded_recipes():
        yield from (choice for choice in safety.choices_in(recipe.data.get("defaults")) if len(choice[1]) > 1)


def _address(override: Override) -> str:
    return safety.full_address(override.get_key_element().lstrip("+~"))


def _option(address: str, name: str) -> dict[Any, Any]:
    """Return the content of an option, which is held to the rules for recipes where it is the user's."""
    group, _, package = address.partition("@")
    if built_in := recipes.built_in_option(group, name):
        recipes.check_name(group, name)
        return read_document(built_in).data
    file = recipes.own_option(group, name)
    if file is None:
        return {}
    content = safety.read_option(group, file).data
    safety.refuse(file, safety.content_faults(_tree(package.split("."), content)))
    return content


def _check_target(config: DictConfig, package: str, choice: str, option: Mapping[Any, Any]) -> None:
    """Refuse a choice whose target is not that of its node: a recipe writes the node out, and their keys are merged."""
    target = option.get(_TARGET)
    present = OmegaConf.select(config, f"{package}.{_TARGET}", throw_on_resolution_failure=False)
    if target is not None and present is not None and present != target:
        raise ConfigError(
            f"{package}: found the target {present} beside the choice {choice}, which is {target}; expected one of "
            f"them, as their keys are merged. Leave the choice out: `- override /{choice.partition('=')[0]}: null`."
        )


def origin_of(config: Any) -> Origin | None:
    """Return where a config that `compose` made came from; None for any other, a copy of one too."""
    return _origins.get(id(config))


def _recipe_path(recipe: str | None, overrides: Sequence[str], folders: Sequence[Path]) -> Path | None:
    if recipe is not None:
        return folders[0] / Path(recipe).name if folders else recipes.find_recipe(recipe)
    names = [word.partition("=")[2].strip("'\"") for word in overrides if word.lstrip("+").startswith(f"{GROUP}=")]
    if names:
        # Several, in a list, are no one file, and null is none.
        with suppress(ConfigError):
            return recipes.find_recipe(names[-1])
    return None


def plain(node: Any) -> Any:
    """Return a config as dicts, lists and scalars, with every interpolation resolved."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


@dataclass(frozen=True)
class SetParts:
    """What a recipe and overrides are made of.

    Args:
        inherited: the recipes below the named one, the nearest first.
        options: what they choose, as it would be written: `hypergradient=cg`.
        keys: dotted, that they set; one stands for all that is below it.
    """

    inherited: list[str]
    options: list[str]
    keys: frozenset[str]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a resolved config that they set, its name and its data, which no run is without.

        Args:
            config: plain, with every reference resolved.
        """
        always = {"name", "data", *(["hypergradient"] if config["graph"]["lower_to_upper"] else [])}
        return dict(_part(config, "", self.keys | always))


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
        loaded = loaded_recipes()
    overrides = [override for override in _parsed(tuple(words)) if not override.is_delete()]
    keys = {override.key_or_group for override in overrides if override.key_or_group not in GROUPS}
    # A default of conf/config.yaml is nobody's choice.
    chosen = {_address(override) for override in overrides}
    for recipe in loaded:
        chosen |= {address for address, _ in safety.choices_in(recipe.data.get("defaults"))}
        keys |= {key for key, _ in ends(recipe.data)}
    options = []
    for address, name in reversed(choices.items()):
        group, _, package = place = safety.full_address(str(address)).partition("@")
        if group in OPTION_GROUPS and isinstance(name, str) and "".join(place) in chosen:
            options.append(f"{address}={name}")
            file = None if group in safety.TARGET_GROUPS else recipes.option_file(group, name)
            keys |= {package} if file is None else {f"{package}.{key}" for key in read_document(file).data}
    return SetParts([recipe.path.stem for recipe in loaded[1:]], options, frozenset(keys))


def _part(value: Any, path: str, keys: frozenset[str]) -> Any:
    """Return what keys have of a tree that stands at a dotted path."""
    if path in keys or not isinstance(value, dict):
        return value
    places = {key: f"{path}.{key}".lstrip(".") for key in value}
    above = {key: place for key, place in places.items() if any(f"{name}.".startswith(f"{place}.") for name in keys)}
    return {key: _part(value[key], place, keys) for key, place in above.items()}
