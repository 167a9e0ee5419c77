"""Hydra's repository of configs, which reads each built-in config once a process.

A composition reads some twenty files and Hydra's own schema; parsing and copying them took half of its time.
"""

import copy
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from mlotool.config.paths import SUFFIX, package_dir

_HYDRAS_OWN = "hydra.conf"
_read: dict[tuple[str, str, str], tuple[Any, bytes]] = {}


class ReadOnceRepository(ConfigRepository):
    """Finds configs as Hydra's does, and keeps what it has read of the built-in ones for the next composition."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadOnceRepository":
        """Copy what a composition changes, the list of sources; Hydra would copy all registered configs as well."""
        copied = copy.copy(self)
        copied.sources = list(self.sources)
        return copied

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a config that belongs to the caller."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        version = None if source is None else _version(source, config_path)
        if source is None or version is None:
            return super().load_config(config_path)
        key = (source.scheme(), source.path, config_path)
        known, content = _read.get(key, (None, b""))
        # Two nodes that were registered are equal where their values are, whatever types they declare.
        is_same = known is version if isinstance(version, ConfigNode) else known == version
        if not is_same:
            result = super().load_config(config_path)
            _read[key] = (version, pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
            return result
        # Hydra changes what it gets. Unpickling takes a sixth of the time of copy.deepcopy.
        loaded: ConfigResult = pickle.loads(content)
        return loaded


def parsed_config(text: str) -> Any:
    """Return the config that a YAML text is, as OmegaConf reads it; the same text is parsed once a process.

    Raises:
        YAMLError: the text is no YAML.
    """
    return pickle.loads(_pickled(text))


@lru_cache(maxsize=64)
def _pickled(text: str) -> bytes:
    return pickle.dumps(OmegaConf.create(text), pickle.HIGHEST_PROTOCOL)


def _version(source: ConfigSource, config_path: str) -> Any:
    """Return what changes when a built-in config does; None for a config that is not built in."""
    name = config_path if config_path.endswith(SUFFIX) else f"{config_path}{SUFFIX}"
    if source.scheme() == "file" and source.path == str(package_dir("conf")):
        status = (Path(source.path) / name).stat()
        return status.st_mtime_ns, status.st_size
    if source.scheme() == "pkg" and source.path == _HYDRAS_OWN:
        return _HYDRAS_OWN
    if source.scheme() == "structured":
        node: Any = ConfigStore.instance().repo
        for part in name.split("/"):
            node = node.get(part) if isinstance(node, dict) else None
        # Other applications of the process may change theirs at any time, and some cannot be pickled.
        return node if isinstance(node, ConfigNode) and node.provider in ("hydra", "mlotool") else None
    return None
