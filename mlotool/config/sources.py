"""Makes recipes Hydra's config group `recipe`, ./conf options of its groups, and the schema its `mlotool_schema`.

A `hydra_plugins` package would alter every Hydra application of the machine, so the plugins are registered here, in
this process only, and act for mlotool's own configs alone.
"""

import logging
from collections.abc import Iterator, Sequence
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

from mlotool.config import paths
from mlotool.config.chosen_decisions import move_folder
from mlotool.config.defaults import choices_in, full_address, recipe_entries
from mlotool.config.options import (
    FOLDER,
    TARGET_GROUPS,
    check_total,
    option_file,
    options_folder,
    own_options,
    read_option,
)
from mlotool.config.paths import GROUP, SUFFIX, is_literal, package_dir, recipe_file, recipe_folders
from mlotool.config.reading import Document, read_document
from mlotool.config.safety import check_recipe
from mlotool.config.schema import OPTION_GROUPS, Config
from mlotool.core.errors import ConfigError
from mlotool.core.escape import escape

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
    paths.named_folders[:] = [Path(folder).absolute() for folder in extra]
    _loaded.clear()
    plugins = Plugins.instance()
    plugins.register(RecipesSource)
    plugins.register(OptionsSource)
    plugins.register(RecipesSearchPath)
    store = ConfigStore.instance()
    # Hydra 1.4 warns where a name is stored again.
    if f"{SCHEMA}{SUFFIX}" not in store.repo:
        store.store(name=SCHEMA, node=Config, provider="mlotool")


@contextmanager
def sources(extra: Sequence[Path] = ()) -> Iterator[None]:
    """Register with other `extra` folders for the time of one composition."""
    before = list(paths.named_folders)
    register_sources([*extra, *before])
    try:
        yield
    finally:
        paths.named_folders[:] = before


def loaded_recipes() -> list[Document]:
    """Return the recipes that went into the composition made last, those that inherit first."""
    return list(_loaded.values())


class RecipesSource(ConfigSource):
    """`recipes://<folder>`: its files as group `recipe`. Hydra calls these methods by keyword: keep their names."""

    @staticmethod
    def scheme() -> str:
        """Return `recipes`."""
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a recipe, after the refusals: no recipe reaches Hydra around them."""
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"Config not found : {self.full_path()}/{config_path}")
        document = check_recipe(file)
        self._announce(file)
        _loaded.setdefault(file, document)
        config = OmegaConf.create(document.text)
        assert OmegaConf.is_dict(config)
        move_folder(config)
        _choose_none(config, document.data)
        header = self._get_header_dict(document.text)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def available(self) -> bool:
        """Say whether the folder is there."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Say whether the path is the root, `recipe`, or a folder below it."""
        if config_path in ("", GROUP):
            return self.available()
        folder = self._below(config_path)
        return folder is not None and (Path(self.path) / folder).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Say whether the path is a recipe."""
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return recipes and folders of recipes."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [GROUP]
        folder = Path(self.path) / (self._below(config_path) or "")
        names: list[str] = []
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith((".", "_")):
                self._list_add_result(names, f"{config_path}/{entry.name}", entry.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path | None:
        name = self._below(config_path)
        return None if not name else recipe_file(Path(self.path), name)

    def _below(self, config_path: str) -> str | None:
        group, _, name = config_path.partition("/")
        return name if group == GROUP and ".." not in name.split("/") else None

    def _announce(self, file: Path) -> None:
        """Say so when a recipe of the user's hides a built-in one of that name."""
        built_in = package_dir("recipes")
        hidden = built_in / file.relative_to(self.path)
        if Path(self.path) != built_in and hidden.is_file() and file not in _announced:
            _announced.add(file)
            _log.warning("Using %s, which hides the built-in recipe '%s'.", escape(str(file)), file.stem)


class OptionsSource(ConfigSource):
    """`options://conf`: ./conf of the working folder. Hydra calls these methods by keyword: keep their names."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._num_nodes = 0

    @staticmethod
    def scheme() -> str:
        """Return `options`."""
        return "options"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option, after the refusals: none reaches Hydra around them."""
        group, _, name = config_path.partition("/")
        file = option_file(group, name)
        if file is None:
            raise ConfigLoadError(f"Config not found : {self.full_path()}/{config_path}")
        document = read_option(group, file)
        self._num_nodes += document.num_nodes
        check_total(self._num_nodes)
        config = OmegaConf.create(document.text)
        return ConfigResult(self.provider, self.full_path(), config, header={"package": None})

    def available(self) -> bool:
        """Say whether the folder is there."""
        return options_folder() is not None

    def is_group(self, config_path: str) -> bool:
        """Say whether the path is the root, or a group's with a folder here."""
        return self.available() and (not config_path or config_path in _groups())

    def is_config(self, config_path: str) -> bool:
        """Say whether the path is an option."""
        group, _, name = config_path.partition("/")
        return option_file(group, name) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the groups, or the options of one."""
        if not config_path:
            return [] if results_filter == ObjectType.CONFIG else _groups()
        return [] if results_filter == ObjectType.GROUP else own_options(config_path)


class RecipesSearchPath(SearchPathPlugin):
    """Appends the folders of recipes, and ./conf, to the search path of mlotool's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them in the order in which they are looked through."""
        own = str(package_dir("conf"))
        if not any(each.provider == "main" and each.path.endswith(own) for each in search_path.get_path()):
            return
        for _, folder in recipe_folders():
            search_path.append(provider="mlotool", path=f"recipes://{folder}")
        if options_folder() is not None:
            search_path.append(provider="mlotool", path=f"options://{FOLDER}")


def _groups() -> list[str]:
    return [group for group in OPTION_GROUPS if (FOLDER / group).is_dir()]


def _choose_none(config: Any, content: dict[Any, Any]) -> None:
    """Choose no option of a group whose node a recipe writes out: the default one would leave its keys in it.

    Where a recipe inherits another one, it has to say so itself.
    """
    entries = content.get("defaults") or ["_self_"]
    if any(recipe_entries(entries)):
        return
    chosen = [address for word in ("", "override") for address, _ in choices_in(entries, word)]
    for group, target in _default_targets().items():
        node = content.get(group)
        is_own = isinstance(node, dict) and node.get("_target_", target) != target
        if is_own and full_address(group) not in chosen:
            entries = [*entries, {f"override /{group}": None}]
            config["defaults"] = entries


@cache
def _default_targets() -> dict[str, str]:
    """Return the targets of the options that every config has, by group."""
    conf = package_dir("conf")
    choices = {key: value for each in read_document(conf / "config.yaml").data["defaults"] if isinstance(each, dict)
               for key, value in each.items() if key in TARGET_GROUPS}  # fmt: skip
    return {group: read_document(conf / group / f"{name}{SUFFIX}").data["_target_"] for group, name in choices.items()}
