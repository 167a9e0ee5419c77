"""The user's options (options.py) as Hydra wants them. The loader adds them for mlotool's own configs alone."""

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource

from mlotool.config.options import FOLDER, check_total, option_file, options_folder, own_options, read_option
from mlotool.config.repository import parsed_config
from mlotool.config.schema import OPTION_GROUPS

SCHEME = "options"


class OptionsSource(ConfigSource):
    """./conf of the working folder. Hydra calls these methods by keyword: keep their names."""

    def __init__(self) -> None:
        super().__init__(provider="mlotool", path=f"{SCHEME}://{FOLDER}")
        self._num_nodes = 0

    @staticmethod
    def scheme() -> str:
        """Return `options`."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option, after the refusals: none reaches Hydra around them."""
        group, _, name = config_path.partition("/")
        file = option_file(group, name)
        if file is None:
            raise ConfigLoadError(f"Config not found : {self.full_path()}/{config_path}")
        document = read_option(group, file)
        self._num_nodes += document.num_nodes
        check_total(self._num_nodes)
        config = parsed_config(document.text)
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


def _groups() -> list[str]:
    return [group for group in OPTION_GROUPS if (FOLDER / group).is_dir()]
