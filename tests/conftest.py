import gc
import logging
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from lightning_fabric.utilities import registry  # before the variable below, which it sets otherwise
from torchvision.utils import save_image

from mlotool.config import package_dir, trusted
from mlotool.core import process, user_code
from tests import forked

LONG = (
    "docs/test_pages",
    *("cli/test_sweep", "program/test_trace", "runner/test_launcher", "cli/test_mistakes", "runner/test_distributed"),
    *("test_recipes", "runner/test_resume", "runner/test_kills", "runner/test_shards", "program/test_chain"),
    *("hypergradient/test_matrix", "hypergradient/test_robustness_of_modules", "report/test_write_report"),
    *("benchmarks/test_gpu_kit", "hypergradient/test_saba"),
)
"""Files that take longest; with `--no-loadscope-reorder` they begin first, so that no worker is left with one."""

LAST = "benchmarks/test_rivals"
"""Lets JAX begin threads, after which no process may be forked: streams with workers fork theirs from pytest's."""

# Until all tests are imported.
gc.disable()
if not torch.cuda.is_available():
    # Lightning has torch ask NVIDIA's library for devices again and again, for 0.3 ms; CUDA itself knows at once.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    # It takes a millisecond, for devices that are not there.
    torch.manual_seed = torch.default_generator.manual_seed


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


# Each Trainer looks in all installed packages for callbacks.
registry.entry_points = cache(registry.entry_points)  # type: ignore[assignment]
# To parse configs anew is a fifth of each composition.
for source in Plugins.instance().discover(ConfigSource):
    source.load_config = remembering(source.load_config)  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    # Before there are workers, which inherit it.
    if getattr(config.option, "numprocesses", None):
        os.environ[forked.ADDRESS] = forked.address()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / f"{name}.py": place for place, name in enumerate(LONG)}
    last = {folder / f"{LAST}.py": len(places) + 1}
    items.sort(key=lambda item: (places | last).get(item.path, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    # What is imported stays: to walk it again and again takes the collector a twentieth of the time of the tests.
    gc.collect()
    process.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    # To each logger that does not propagate, most of them torch's, pytest adds its handlers six times a test.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _waits_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power cut shows whether what is written was on the disk already."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _trust_ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps what it trusts; what one test trusts, the next one must not."""
    monkeypatch.setattr(trusted, "_packages", dict(trusted._packages))
    monkeypatch.setattr(user_code, "_packages", set(user_code._packages))


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of CIFAR-10's layout, a few images each."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("test", 2)):
        for label in range(10):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                save_image(torch.rand(3, 32, 32, generator=generator), folder / f"{number}.png")
    return root
