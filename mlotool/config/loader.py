"""Hydra's loader of configs, with the options of ./conf and our rule for nodes that change their `_target_`.

For mlotool's own configs alone.
"""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra._internal.hydra as hydra_internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath, SearchPathElement
from hydra.core.default_element import GroupDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from mlotool.config.chosen_decisions import fill_decisions, move_folder, moved_word
from mlotool.config.composition_faults import Place, is_collecting, remove, unfit_places
from mlotool.config.defaults import full_address
from mlotool.config.option_source import SCHEME, OptionsSource
from mlotool.config.options import FOLDER, check_name, check_placed, check_total, options_folder
from mlotool.config.paths import SUFFIX, package_dir
from mlotool.config.reading import leaves
from mlotool.config.replacement import TARGET, Dropped, Layer, choice_of, dropped_places
from mlotool.config.repository import ReadOnceRepository
from mlotool.config.schema import GROUPS, OPTION_GROUPS, new_node
from mlotool.core.errors import ConfigError

# A group or a folder of Hydra's may hold anything, a mode too.
_MODE_SETTERS = re.compile(r"hydra($|[/@]|\.mode|\.searchpath)")


def install_loader() -> None:
    """Let Hydra load with `ReplacingLoader`, in this process."""
    # Neither OmegaConf's merge nor Hydra's public interface knows of replacing a node: this is the one place that all
    # of compose, `@hydra.main`, `--cfg` and the jobs of a sweep go through.
    hydra_internal.ConfigLoaderImpl = ReplacingLoader  # type: ignore[misc]


class ReplacingLoader(ConfigLoaderImpl):
    """Loads as Hydra does, from ./conf too; where a node has another `_target_` than before, the old settings go."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = ReadOnceRepository(config_search_path)

    # Hydra 1.4 comes here by other ways than `load_configuration`, which all callers of 1.3 use.
    def _load_configuration_impl(self, config_name: Any, overrides: Any, *arguments: Any, **keywords: Any) -> Any:
        """Keep the overrides in mind: a choice of theirs wins over what a recipe writes out."""
        self._dropped: dict[int, Dropped] = {}
        self._loaded: dict[int, ConfigResult] = {}
        self._parsed: list[Override] | None = None
        if self._is_ours():
            parsed = OverridesParser.create().parse_overrides(overrides)
            overrides = [_moved(each, word) for each, word in zip(parsed, overrides, strict=True)]
            parsed = OverridesParser.create().parse_overrides(overrides)
            # Before a run, Hydra 1.3 composes the config once more to ask for nothing but its mode.
            if keywords.get("validate_sweep_overrides") is False and not self._sets_mode(parsed):
                return OmegaConf.create({"hydra": {"mode": None}})
            _check_choices(parsed)
            # What a node with another target holds is new to Hydra, which wants a plus for it; so are splits and edges.
            overrides = [
                f"++{word}" if _is_node(each) or _is_open(each) else word
                for each, word in zip(parsed, overrides, strict=True)
            ]
            self._parsed = parsed
            # Hydra 1.4 has parsed them already, as they were.
            keywords.pop("parsed_overrides", None)
        config = super()._load_configuration_impl(config_name, overrides, *arguments, **keywords)
        if self._is_ours():
            fill_decisions(config)
        return config

    def _is_ours(self) -> bool:
        return any(_is_built_in(each) for each in self.config_search_path.get_path())

    def _sets_mode(self, overrides: Sequence[Override]) -> bool:
        """Say whether `hydra.mode` may have a value: no built-in config, recipe or option of ./conf sets it."""
        has_own_folder = any(each.provider == "command-line" for each in self.config_search_path.get_path())
        return has_own_folder or any(_MODE_SETTERS.match(each.key_or_group) for each in overrides)

    def _process_config_searchpath(self, config_name: Any, parsed_overrides: Any, repo: Any) -> None:
        super()._process_config_searchpath(config_name, parsed_overrides, repo)
        # Not a plugin of the search path: only here are the folders known that the command line names.
        sources, folder = repo.get_sources(), options_folder()
        self._has_options = folder is not None and self._is_ours() and not any(_is_at(each, folder) for each in sources)
        self._num_values = 0
        if self._has_options:
            # The schema is last.
            sources.insert(-1, OptionsSource())

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> Any:
        if self._parsed is not None:
            layers = [self._layer(default, repo) for default in defaults] + list(_written_out(self._parsed))
            chosen = [full_address(each.get_key_element()) for each in self._parsed if not _is_node(each)]
            plans = dropped_places(layers, chosen)
            self._dropped = {id(default): plan for default, plan in zip(defaults, plans, strict=False) if plan}
        config = super()._compose_config_from_defaults_list(defaults=defaults, repo=repo)
        _open_nulls(config, self._parsed or ())
        return config

    def _layer(self, default: Any, repo: Any) -> Layer:
        result = self._loaded[id(default)] = super()._load_single_config(default=default, repo=repo)
        if not _is_built_in(result):
            move_folder(result.config)
        content: Any = OmegaConf.to_container(result.config, resolve=False)
        if self._has_options:
            self._check_option(default, result, content)
        defaults = [{_line(each): None} for each in result.defaults_list or () if isinstance(each, GroupDefault)]
        return Layer(content, choice_of(default.config_path or "", default.package or ""), defaults)

    def _check_option(self, default: Any, result: Any, content: Any) -> None:
        """Hold what ./conf gives to the rules for recipes: only here is it known where it is placed."""
        path, parent = default.config_path or "", default.parent or ""
        group, _, name = path.partition("/")
        if result.path.startswith(f"{SCHEME}://"):
            self._num_values += len(leaves(content))
            check_total(self._num_values)
            check_placed(FOLDER / f"{path}{SUFFIX}", content)
        # What a built-in option inherits from is the built-in one.
        elif result.provider == "main" and group in OPTION_GROUPS and not parent.startswith(f"{group}/"):
            check_name(group, name)

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        # What its layer was made of; once, since Hydra merges nodes of it into the config.
        result = self._loaded.pop(id(default), None) or super()._load_single_config(default=default, repo=repo)
        places = self._dropped.get(id(default), {})
        # What is built in fits.
        unfit = self._unfit(default, result.config) if is_collecting() and not _is_built_in(result) else []
        if not places and not unfit:
            return result
        # Hydra keeps what it has read.
        result = copy.copy(result)
        result.config = copy.deepcopy(result.config)
        remove(result.config, unfit)
        for place, keys in places.items():
            node = OmegaConf.select(result.config, place, throw_on_resolution_failure=False)
            if OmegaConf.is_dict(node):
                kept = {key: node._get_node(key) for key in keys if key in node}
                OmegaConf.update(result.config, place, kept, merge=False)
        return result

    def _unfit(self, default: Any, config: Any) -> list[Place]:
        path = default.config_path or ""
        if self._parsed is None or path.partition("/")[0] not in GROUPS:
            return []
        content: Any = OmegaConf.to_container(config, resolve=False)
        return unfit_places(path, content)


def _moved(override: Override, word: str) -> str:
    is_plain = override.type == OverrideType.CHANGE and not override.is_sweep_override()
    return moved_word(override.key_or_group, override.value(), word) if is_plain else word


def _open_nulls(config: Any, overrides: Sequence[Override]) -> None:
    """Give null nodes of the schema their keys where an override sets some: OmegaConf cannot merge into null."""
    for override in overrides:
        parts = override.key_or_group.split(".")
        sets_keys = not override.is_sweep_override() and isinstance(override.value(), dict)
        for size in range(1, len(parts) + sets_keys):
            *parents, key = parts[:size]
            parent = OmegaConf.select(config, ".".join(parents)) if parents else config
            if not OmegaConf.is_dict(parent) or key not in parent:
                break
            node = new_node(".".join(parts[:size]))
            if node is not None and parent._get_node(key)._is_none():
                parent[key] = node


def _line(default: GroupDefault) -> str:
    address = f"{default.group}@{default.package}" if default.package else f"{default.group}"
    return f"override {address}" if default.override else address


def _is_at(source: ConfigSource, folder: Path) -> bool:
    """Say whether a folder that the command line names is ./conf: then it is trusted."""
    return source.scheme() == "file" and Path(source.path).is_dir() and folder.samefile(source.path)


def _is_built_in(element: SearchPathElement | ConfigResult) -> bool:
    return element.provider == "main" and element.path.removeprefix("file://") == str(package_dir("conf"))


def _check_choices(overrides: Sequence[Override]) -> None:
    """Refuse a list that is no list of options' names: Hydra takes its values for texts without looking."""
    for override in overrides:
        choice = None if override.is_sweep_override() else override.value()
        wrong = [each for each in choice if not isinstance(each, str)] if isinstance(choice, list) else []
        group = override.key_or_group.lstrip("/")
        if wrong and (group in GROUPS or "/" in group):
            raise ConfigError(
                f"{group}: found {wrong[0]!r} in {override.get_value_element_as_str()}; expected the name of an option "
                "of that group, as in debug=fast. Correct the override."
            )


def _is_node(override: Override) -> bool:
    """Say whether an override writes out a node: `problems.a.optimizer={_target_: .., lr: .1}`."""
    is_plain = override.type == OverrideType.CHANGE and not override.is_sweep_override()
    value = override.value() if is_plain else None
    return isinstance(value, dict) and TARGET in value


def _is_open(override: Override) -> bool:
    """Say whether an override sets keys that have their names from users.

    Those are several at once, `evaluate={splits: {val: 9}}`, and decisions of model spaces, `decisions.kernel_0=k5`.
    """
    is_plain = override.type == OverrideType.CHANGE and not override.is_sweep_override()
    first, _, rest = override.key_or_group.partition(".")
    is_named = first in ("evaluate", "graph", "analyses", "decisions")
    return is_plain and is_named and (isinstance(override.value(), dict) or (first == "decisions" and bool(rest)))


def _written_out(overrides: Sequence[Override]) -> list[Layer]:
    """Return the nodes that overrides write out as layers, which come last."""
    layers = []
    for override in filter(_is_node, overrides):
        content: Any = override.value()
        for part in reversed(override.key_or_group.split(".")):
            content = {part: content}
        layers.append(Layer(content))
    return layers
