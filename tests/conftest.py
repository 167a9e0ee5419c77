"""Hooks and fixtures of all tests. Pytest's own process, which has workers, imports neither torch nor Lightning."""

import gc
import logging
import os
from collections import Counter
from pathlib import Path

import pytest

from mlotool.config.security import trusted
from mlotool.core import process
from tests import forked

LONG = (
    "docs/test_pages",
    *("cli/test_sweep", "program/test_trace", "runner/test_launcher", "cli/test_mistakes", "runner/test_distributed"),
    *("test_recipes", "runner/test_resume", "runner/test_kills", "runner/test_shards", "program/test_chain"),
    *("hypergradient/test_robustness_of_modules", "report/test_write_report"),
    *("benchmarks/test_gpu_kit", "hypergradient/test_saba"),
)
"""Files that take longest; with `--no-loadscope-reorder` they begin first, so that no worker is left with one."""

LAST = "benchmarks/test_rivals"
"""Lets JAX begin threads, after which no process may be forked: streams with workers fork theirs from pytest's."""

# Until all tests are imported.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        # Before there are workers, which inherit it.
        os.environ[forked.ADDRESS] = forked.address()
    else:
        from tests.preparation import prepare

        prepare()


# Before pytest leaves out what is slow.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / f"{name}.py": place for place, name in enumerate(LONG)}
    last = {folder / f"{LAST}.py": len(places) + 1}
    items.sort(key=lambda item: (places | last).get(item.path, len(places)))
    cases: Counter[str] = Counter()
    for item in items:
        sample, name = item.get_closest_marker("one_in"), item.nodeid.partition("[")[0]
        if sample is not None and not item.get_closest_marker("slow"):
            if cases[name] % sample.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[name] += 1


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
    from mlotool.core import user_code

    monkeypatch.setattr(trusted, "_packages", dict(trusted._packages))
    monkeypatch.setattr(user_code, "_packages", set(user_code._packages))


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of CIFAR-10's layout, a few images each."""
    import torch
    from torchvision.utils import save_image

    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("test", 2)):
        for label in range(10):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                save_image(torch.rand(3, 32, 32, generator=generator), folder / f"{number}.png")
    return root
