"""Makes recipes Hydra's config group `recipe`, and the schema its `mlotool_schema`; in this process only.

A `hydra_plugins` package would alter every Hydra application of the machine, so both plugins are registered here.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from mlotool.config import paths
from mlotool.config.loader import install_loader
from mlotool.config.paths import GROUP, SUFFIX, is_literal, package_dir, recipe_file, recipe_folders
from mlotool.config.repository import parsed_config
from mlotool.config.safety import check_text
from mlotool.config.schema import Config
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

SCHEMA = "mlotool_schema"

_log = logging.getLogger("mlotool")
_loaded: dict[Path, None] = {}
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
    install_loader()
    plugins = Plugins.instance()
    plugins.register(RecipesSource)
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


def loaded_recipes() -> list[Path]:
    """Return the recipe files that went into the composition made last."""
    return list(_loaded)


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
        text = check_text(file)
        self._announce(file)
        _loaded.setdefault(file)
        config = parsed_config(text)
        header = self._get_header_dict(text)
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


class RecipesSearchPath(SearchPathPlugin):
    """Appends the folders of recipes to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them in the order in which they are looked through."""
        for _, folder in recipe_folders():
            search_path.append(provider="mlotool", path=f"recipes://{folder}")
