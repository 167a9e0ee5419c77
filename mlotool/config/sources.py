"""Makes recipes Hydra's config group `recipe`, ./conf options of its groups, and the schema its `mlotool_schema`.

A `hydra_plugins` package would alter every Hydra application of the machine, so the plugins are registered here, in
this process only, and act for mlotool's own configs alone.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config import recipes
from mlotool.config.options import (
    FOLDER,
    TARGET_GROUPS,
    option_file,
    options_folder,
    own_options,
    read_option,
)
from mlotool.config.reading import Document, read_document
from mlotool.config.recipes import GROUP, SUFFIX, is_literal, package_dir, recipe_file, recipe_folders
from mlotool.config.safety import check_recipe, choices_in, inherited_file, recipe_entries
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
        if not is_literal(str(folder)):
            raise ConfigError(
                f"Found the folder '{folder}'; expected one without '$' and backslashes in its path, which Hydra would "
                "resolve. Rename it."
            )
    recipes.named_folders[:] = [Path(folder).absolute() for folder in extra]
    _loaded.clear()
    plugins = Plugins.instance()
    for plugin in (BuiltInSource, RecipesSource, OptionsSource, RecipesSearchPath):
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
    """YAML files of a folder, each parsed once a process. Hydra calls these methods by keyword: keep their names."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file, after the refusals: none reaches Hydra around them."""
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"Config not found : {self.full_path()}/{config_path}")
        config, text = self._read(config_path, file)
        return ConfigResult(self.provider, self.full_path(), config, header=self._get_header_dict(text))

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
        return Path(self.path) / config_path

    def _file(self, config_path: str) -> Path | None:
        return recipe_file(Path(self.path), config_path)

    def _read(self, config_path: str, file: Path) -> tuple[DictConfig, str]:
        text = _text(file, file.stat().st_mtime_ns)
        return _config(text), text


class BuiltInSource(_FolderSource):
    """`builtin://<folder>`: conf/ of mlotool."""

    @staticmethod
    def scheme() -> str:
        """Return `builtin`."""
        return "builtin"


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

    def _read(self, config_path: str, file: Path) -> tuple[DictConfig, str]:
        document = check_recipe(file)
        built_in = package_dir("recipes")
        hidden = built_in / file.relative_to(self.path)
        if Path(self.path) != built_in and hidden.is_file() and file not in _announced:
            _announced.add(file)
            _log.warning("Using %s, which hides the built-in recipe '%s'.", escape(str(file)), file.stem)
        _loaded.setdefault(file, document)
        config = _config(document.text)
        _move_folder(config)
        _choose_none(config, file, document)
        return config, document.text


class OptionsSource(_FolderSource):
    """`options://conf`: ./conf of the working folder."""

    @staticmethod
    def scheme() -> str:
        """Return `options`."""
        return "options"

    def available(self) -> bool:
        """Say whether the folder is there."""
        return options_folder() is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the groups, or the options of one."""
        kind = ObjectType.CONFIG if config_path else ObjectType.GROUP
        names = own_options(config_path) if config_path else [group for group in OPTION_GROUPS if self.is_group(group)]
        return names if results_filter in (None, kind) else []

    def _folder(self, config_path: str) -> Path | None:
        return FOLDER / config_path if not config_path or config_path in OPTION_GROUPS else None

    def _file(self, config_path: str) -> Path | None:
        group, _, name = config_path.partition("/")
        return option_file(group, name)

    def _read(self, config_path: str, file: Path) -> tuple[DictConfig, str]:
        return _config(read_option(config_path.partition("/")[0], file).text), ""


class RecipesSearchPath(SearchPathPlugin):
    """Appends the folders of recipes, and ./conf, to the search path of mlotool's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them in the order in which they are looked through."""
        own = str(package_dir("conf"))
        main = [each for each in search_path.get_path() if each.provider == "main" and each.path.endswith(own)]
        if not main:
            return
        main[0].path = f"builtin://{own}"
        for _, folder in recipe_folders():
            search_path.append(provider="mlotool", path=f"recipes://{folder}")
        if options_folder() is not None:
            search_path.append(provider="mlotool", path=f"options://{FOLDER}")


@lru_cache(maxsize=256)
def _text(file: Path, changed: int) -> str:
    return file.read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def _parsed(text: str) -> DictConfig:
    config = OmegaConf.create(text)
    assert isinstance(config, DictConfig)
    return config


def _config(text: str) -> DictConfig:
    """Return a file's content as a config of the caller's own: Hydra takes defaults lists out of it."""
    return deepcopy(_parsed(text))


def _move_folder(config: DictConfig) -> None:
    """Put a folder that stands where decisions do in a recipe under a key of its own, in place."""
    node = config._get_node("decisions")
    if node is not None and isinstance(node._value(), str):
        with open_dict(config):
            config["decisions_from"] = config.pop("decisions")


def _choose_none(config: DictConfig, file: Path, document: Document) -> None:
    """Choose no option where a recipe writes out a node of another target: the option would leave its keys in it.

    Those are the options that every config has, and those that the recipes choose from which this one inherits.
    """
    entries = document.data.get("defaults") or ["_self_"]
    chosen = {address for word in ("", "override") for address, _ in choices_in(entries, word)}
    nones = []
    for address, name in {**_default_choices(), **_inherited(file, document, set())}.items():
        group, _, package = address.partition("@")
        target = _target(document.data, package)
        if address not in chosen and target is not None and target != _option_target(group, name):
            nones.append({f"override /{address}": None})
    if nones:
        config["defaults"] = [*entries, *nones]


def _inherited(file: Path, document: Document, seen: set[Path]) -> dict[str, str]:
    """Return the options that the recipes below one choose, by address."""
    found: dict[str, str] = {}
    for name in recipe_entries(document.data.get("defaults")):
        below = inherited_file(name, file)
        if below is not None and below not in seen:
            other = check_recipe(below)
            found |= _inherited(below, other, {*seen, below})
            for word in ("", "override"):
                for address, options in choices_in(other.data.get("defaults"), word):
                    found.pop(address, None)
                    found.update((address, option) for option in options)
    return found


def _target(node: Any, place: str) -> Any:
    for part in [*place.split("."), "_target_"]:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _option_target(group: str, name: str) -> Any:
    built_in = package_dir("conf") / group / f"{name}{SUFFIX}"
    file = built_in if built_in.is_file() else option_file(group, name)
    return None if file is None else read_document(file).data.get("_target_")


@cache
def _default_choices() -> dict[str, str]:
    """Return the options that every config has, by address."""
    entries = read_document(package_dir("conf") / "config.yaml").data["defaults"]
    return {address: option for address, [option] in choices_in(entries, "") if address.split("@")[0] in TARGET_GROUPS}
