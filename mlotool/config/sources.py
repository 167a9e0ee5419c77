"""Makes recipes Hydra's config group `recipe`, ./conf options of its groups, and the schema its `mlotool_schema`.

A `hydra_plugins` package would alter every Hydra application of the machine, so the plugins are registered here, in
this process only, and act for mlotool's own configs alone.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mlotool.config import derived, recipes
from mlotool.config.recipes import FOLDER, GROUP, SUFFIX, own_option, package_dir, recipe_file
from mlotool.config.schema import OPTION_GROUPS, Config
from mlotool.config.security import safety
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape
from mlotool.folders.documents import Document, read_document, value_at

SCHEMA = "mlotool_schema"

_log = logging.getLogger("mlotool")
_loaded: dict[Path, Document] = {}
_announced: set[Path] = set()


def register_sources(extra: Sequence[Path] = ()) -> None:
    """Let Hydra find recipes and schema; needed before `@hydra.main` starts, `compose` does it itself.

    Args:
        extra: folders of recipe files that were named by their path; they come first, and replace earlier ones.
    """
    for folder in (Path.cwd(), *extra):
        if not recipes.is_literal(str(folder)):
            raise ConfigError(f"Found the folder '{folder}'; expected a path without '$' and backslashes. Rename it.")
    recipes.named_folders[:] = [Path(folder).absolute() for folder in extra]
    _loaded.clear()
    plugins = Plugins.instance()
    for plugin in (Source, SearchPath):
        plugins.register(plugin)
    derived.register()
    store = ConfigStore.instance()
    # Hydra 1.4 warns where a name is stored again.
    if f"{SCHEMA}{SUFFIX}" not in store.repo:
        store.store(name=SCHEMA, node=Config, provider="mlotool")


@contextmanager
def sources(extra: Sequence[Path] = ()) -> Iterator[None]:
    """Register with other `extra` folders for the time of one composition."""
    before = list(recipes.named_folders)
    register_sources([*extra, *before])
    try:
        yield
    finally:
        recipes.named_folders[:] = before


def loaded_recipes() -> list[Document]:
    """Return the recipes that went into the composition made last, those that inherit first."""
    return list(_loaded.values())


class Source(ConfigSource):
    """Recipes as the group `recipe`, and the options of ./conf, refused or read by our rules.

    Hydra calls these methods by keyword: keep their names.
    """

    @staticmethod
    def scheme() -> str:
        """Return `recipes`."""
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file, after the refusals: none reaches Hydra around them."""
        group, _, name = config_path.partition("/")
        file = _file(group, name)
        if file is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        document = _read_recipe(file, name) if group == GROUP else safety.read_option(group, file)
        header = self._get_header_dict(document.text)
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(document.data), header=header)

    def available(self) -> bool:
        """Say that there are recipes."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Say whether the path is a folder's."""
        return not config_path or any(folder.is_dir() for folder in _folders(*config_path.split("/")))

    def is_config(self, config_path: str) -> bool:
        """Say whether the path is a file's."""
        group, _, name = config_path.partition("/")
        return _file(group, name) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the files and folders of a folder."""
        if not config_path:
            groups = [group for group in (GROUP, *OPTION_GROUPS) if self.is_group(group)]
            return [] if results_filter == ObjectType.CONFIG else groups
        entries = {entry.name for folder in _folders(*config_path.split("/")) for entry in folder.glob("[!._]*")}
        names = list[str]()
        for entry in sorted(entries):
            self._list_add_result(names, f"{config_path}/{entry}", entry, results_filter)
        return names


def _folders(group: str, *below: str) -> list[Path]:
    """Return the folders that may hold what Hydra calls `group/below`, those first that hide the others."""
    if group == GROUP:
        return [] if ".." in below else [folder.joinpath(*below) for _, folder in recipes.recipe_folders()]
    return [FOLDER / group] if group in OPTION_GROUPS and not below and recipes.options_folder() is not None else []


def _file(group: str, name: str) -> Path | None:
    if group != GROUP:
        return own_option(group, name.removesuffix(SUFFIX))
    files = (recipe_file(folder, name) for _, folder in recipes.recipe_folders() if name)
    return next(filter(None, files), None)


def _read_recipe(file: Path, name: str) -> Document:
    hidden = recipe_file(package_dir("recipes"), name)
    if hidden not in (None, file) and file not in _announced:
        _announced.add(file)
        _log.warning("Using %s, which hides the built-in recipe '%s'.", escape(str(file)), file.stem)
    _loaded.setdefault(file, safety.check_recipe(file))
    # Of Hydra's own: what was loaded stays as it is written.
    document = safety.check_recipe(file)
    if isinstance(document.data.get("decisions"), str):
        # A folder that stands where decisions do has a key of its own.
        document.data["decisions_from"] = document.data.pop("decisions")
    _choose_none(document)
    return document


class SearchPath(SearchPathPlugin):
    """Appends recipes and ./conf to the search path of mlotool's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them; the path only says where they lie."""
        conf = str(package_dir("conf"))
        if any(entry.provider == "main" and entry.path.endswith(conf) for entry in search_path.get_path()):
            folders = [*(folder for _, folder in recipes.recipe_folders()), *filter(None, [recipes.options_folder()])]
            search_path.append(provider="mlotool", path=f"{Source.scheme()}://{os.pathsep.join(map(str, folders))}")


def _choose_none(document: Document) -> None:
    """Choose no option where a recipe writes out a node of another target: the option would leave its keys in it.

    Those are the options that every config has, and those that the recipes choose from which this one inherits.
    """
    entries = document.data.get("defaults") or ["_self_"]
    chosen = {address for address, _ in safety.choices_in(entries)}
    nones = []
    for address, name in {**_default_choices(), **_inherited(document, set())}.items():
        group, _, package = address.partition("@")
        target, option = value_at(document.data, f"{package}._target_"), recipes.option_file(group, name)
        of_option = None if option is None else read_document(option).data.get("_target_")
        if address not in chosen and target is not None and target != of_option:
            nones.append({f"override /{address}": None})
    if nones:
        document.data["defaults"] = [*entries, *nones]


def unfit_choices(values: Mapping[str, Any]) -> list[str]:
    """Return the options that every config has and of which a part has another target than the values of a recipe say.

    A recipe of these values chooses none there, or the keys of that part would be merged with its own.
    """
    choices = [(address.partition("@")[0], name) for address, name in _default_choices().items()]
    options = {group: read_document(package_dir("conf") / group / f"{name}{SUFFIX}").data for group, name in choices}
    return [group for group, option in options.items() if _differ_below(values.get(group), option)]


def _differ_below(node: Any, option: Any) -> bool:
    """Say whether two nodes of one target have parts of different ones."""
    if not (isinstance(node, Mapping) and isinstance(option, Mapping) and node.get("_target_") == option["_target_"]):
        return False
    pairs = [(node[key], part) for key, part in option.items() if isinstance(part, Mapping) and "_target_" in part]
    return any(value["_target_"] != part["_target_"] or _differ_below(value, part) for value, part in pairs)


def _inherited(document: Document, seen: set[Path]) -> dict[str, str]:
    """Return the options that the recipes below one choose, by address."""
    choices: dict[str, str] = {}
    for name in safety.recipe_entries(document.data.get("defaults")):
        below = safety.inherited_file(name, document.path)
        if below is not None and below not in seen:
            other = safety.check_recipe(below)
            choices |= _inherited(other, {*seen, below})
            for address, options in safety.choices_in(other.data.get("defaults")):
                choices.pop(address, None)
                choices.update((address, option) for option in options)
    return choices


@cache
def _default_choices() -> dict[str, str]:
    """Return the options that every config has, by address."""
    entries = read_document(package_dir("conf") / "config.yaml").data["defaults"]
    return {
        address: option
        for address, [option] in safety.choices_in(entries)
        if address.split("@")[0] in safety.TARGET_GROUPS
    }
