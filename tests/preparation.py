"""What a process that runs tests does once, before it imports them. Pytest's own, which has workers, needs none."""

import os
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from lightning_fabric.utilities import registry  # before the variable below, which it sets otherwise

from mlotool.config import package_dir


def prepare() -> None:
    """Keep this process from doing again and again what has the same result each time."""
    if not torch.cuda.is_available():
        # Lightning has torch ask NVIDIA's library for devices again and again, for 0.3 ms; CUDA itself knows at once.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        # It takes a millisecond, for devices that are not there.
        torch.manual_seed = torch.default_generator.manual_seed
    # Each Trainer looks in all installed packages for callbacks.
    registry.entry_points = cache(registry.entry_points)  # type: ignore[assignment]
    # To parse configs anew is a fifth of each composition.
    sources: Any = Plugins.instance().discover(ConfigSource)
    for source in sources:
        source.load_config = remembering(source.load_config)


def remembering(load: Callable[[ConfigSource, str], ConfigResult]) -> Callable[[ConfigSource, str], ConfigResult]:
    """Return `load_config` of a source that reads schemas, and files of conf/ and of Hydra, once in this process."""
    results: dict[tuple[str, str], bytes] = {}

    def load_config(self: ConfigSource, config_path: str) -> ConfigResult:
        place = (self.path, config_path)
        if self.path not in ("", "hydra.conf", str(package_dir("conf"))):
            return load(self, config_path)
        if place not in results:
            results[place] = pickle.dumps(load(self, config_path))
        result: ConfigResult = pickle.loads(results[place])
        return result

    return load_config
