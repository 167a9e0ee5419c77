"""Makes recipes Hydra's config group `recipe`, ./conf options of its groups, and the schema its `mlotool_schema`.

A `hydra_plugins` package would alter every Hydra application of the machine, so the plugins are registered here, in
this process only, and act for mlotool's own configs alone.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mlotool.config import recipes
from mlotool.config.reading import Document, read_document
from mlotool.config.recipes import FOLDER, GROUP, SUFFIX, own_option, package_dir, recipe_file
from mlotool.config.resolve import value_at
from mlotool.config.safety import (
    TARGET_GROUPS,
    check_recipe,
    choices_in,
    inherited_file,
    read_option,
    recipe_entries,
)
from mlotool.config.schema import OPTION_GROUPS, Config
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

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
    for plugin in (RecipesSource, OptionsSource, RecipesSearchPath):
        plugins.register(plugin)
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


class _FolderSource(ConfigSource):
    """YAML files of a folder, refused or read by our rules. Hydra calls these methods by keyword: keep their names."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file, after the refusals: none reaches Hydra around them."""
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"Config not found : {self.full_path()}/{config_path}")
        document = self._read(config_path, file)
        header = self._get_header_dict(document.text)
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(document.data), header=header)

    def available(self) -> bool:
        """Say whether the folder is there."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Say whether the path is a folder's."""
        folder = self._folder(config_path)
        return folder is not None and folder.is_dir()

    def is_config(self, config_path: str) -> bool:
        """Say whether the path is a file's."""
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the files and folders of a folder."""
        folder, names = self._folder(config_path), list[str]()
        for entry in [] if folder is None else sorted(folder.iterdir()):
            if not entry.name.startswith((".", "_")):
                self._list_add_result(names, f"{config_path}/{entry.name}", entry.name, results_filter)
        return sorted(set(names))

    def _folder(self, config_path: str) -> Path | None:
        raise NotImplementedError

    def _file(self, config_path: str) -> Path | None:
        raise NotImplementedError

    def _read(self, config_path: str, file: Path) -> Document:
        raise NotImplementedError


class RecipesSource(_FolderSource):
    """`recipes://<folder>`: its files as group `recipe`."""

    @staticmethod
    def scheme() -> str:
        """Return `recipes`."""
        return "recipes"

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return recipes and folders of recipes."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [GROUP]
        return super().list(config_path, results_filter)

    def _folder(self, config_path: str) -> Path | None:
        below = self._below(config_path) if config_path else ""
        return None if below is None else Path(self.path) / below

    def _file(self, config_path: str) -> Path | None:
        name = self._below(config_path)
        return recipe_file(Path(self.path), name) if name else None

    def _below(self, config_path: str) -> str | None:
        """Return what follows `recipe/`; None for other groups."""
        first, _, rest = config_path.partition("/")
        return rest if first == GROUP and ".." not in rest.split("/") else None

    def _read(self, config_path: str, file: Path) -> Document:
        document, built_in = check_recipe(file), package_dir("recipes")
        hidden = built_in / file.relative_to(self.path)
        if Path(self.path) != built_in and hidden.is_file() and file not in _announced:
            _announced.add(file)
            _log.warning("Using %s, which hides the built-in recipe '%s'.", escape(str(file)), file.stem)
        _loaded.setdefault(file, document)
        # Of Hydra's own: what was loaded stays as it is written.
        document = check_recipe(file)
        if isinstance(document.data.get("decisions"), str):
            # A folder that stands where decisions do has a key of its own.
            document.data["decisions_from"] = document.data.pop("decisions")
        _choose_none(document)
        return document


class OptionsSource(_FolderSource):
    """`options://conf`: ./conf of the working folder."""

    @staticmethod
    def scheme() -> str:
        """Return `options`."""
        return "options"

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the groups, or the options of one."""
        if config_path:
            return recipes.own_options(config_path) if results_filter in (None, ObjectType.CONFIG) else []
        return [group for group in OPTION_GROUPS if self.is_group(group)] if results_filter != ObjectType.CONFIG else []

    def _folder(self, config_path: str) -> Path | None:
        return FOLDER / config_path if not config_path or config_path in OPTION_GROUPS else None

    def _file(self, config_path: str) -> Path | None:
        group, _, name = config_path.partition("/")
        return own_option(group, name)

    def _read(self, config_path: str, file: Path) -> Document:
        document = read_option(config_path.partition("/")[0], file)
        return Document(file, "", document.data)


class RecipesSearchPath(SearchPathPlugin):
    """Appends the folders of recipes, and ./conf, to the search path of mlotool's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them in the order in which they are looked through."""
        conf = str(package_dir("conf"))
        if not any(entry.provider == "main" and entry.path.endswith(conf) for entry in search_path.get_path()):
            return
        for _, folder in recipes.recipe_folders():
            search_path.append(provider="mlotool", path=f"recipes://{folder}")
        if recipes.options_folder() is not None:
            search_path.append(provider="mlotool", path=f"options://{FOLDER}")


def _choose_none(document: Document) -> None:
    """Choose no option where a recipe writes out a node of another target: the option would leave its keys in it.

    Those are the options that every config has, and those that the recipes choose from which this one inherits.
    """
    entries = document.data.get("defaults") or ["_self_"]
    chosen = {address for address, _ in choices_in(entries)}
    nones = []
    for address, name in {**_default_choices(), **_inherited(document, set())}.items():
        group, _, package = address.partition("@")
        target, option = value_at(document.data, f"{package}._target_"), recipes.option_file(group, name)
        of_option = None if option is None else read_document(option).data.get("_target_")
        if address not in chosen and target is not None and target != of_option:
            nones.append({f"override /{address}": None})
    if nones:
        document.data["defaults"] = [*entries, *nones]


def _inherited(document: Document, seen: set[Path]) -> dict[str, str]:
    """Return the options that the recipes below one choose, by address."""
    choices: dict[str, str] = {}
    for name in recipe_entries(document.data.get("defaults")):
        below = inherited_file(name, document.path)
        if below is not None and below not in seen:
            other = check_recipe(below)
            choices |= _inherited(other, {*seen, below})
            for address, options in choices_in(other.data.get("defaults")):
                choices.pop(address, None)
                choices.update((address, option) for option in options)
    return choices


@cache
def _default_choices() -> dict[str, str]:
    """Return the options that every config has, by address."""
    entries = read_document(package_dir("conf") / "config.yaml").data["defaults"]
    return {address: option for address, [option] in choices_in(entries) if address.split("@")[0] in TARGET_GROUPS}
