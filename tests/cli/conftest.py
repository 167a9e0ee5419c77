import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core import global_hydra
from hydra.plugins.sweeper import Sweeper

from mlotool.cli import job
from mlotool.cli.main import main
from mlotool.sweep import driver
from tests import forked

Result = tuple[int, str, str]
Call = Callable[..., Result]
Recipe = Callable[..., Path]


@pytest.fixture(autouse=True)
def jobs_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps fork their jobs: to import torch in a process of its own takes each of them seconds."""
    monkeypatch.setattr(driver, "start_process", forked.start_job)


@pytest.fixture(autouse=True)
def hydra_composes_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let Hydra take a sweep's mode from -m alone, and not try each job: it would compose each config once more."""
    if "hydra_mode" not in request.fixturenames:
        monkeypatch.setattr(global_hydra.Hydra, "get_mode", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", lambda *_: None)


@pytest.fixture
def hydra_mode() -> None:
    """Asked for by a test whose config sets `hydra.mode`."""


@pytest.fixture(autouse=True)
def runs_write_no_page(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A page takes longer than a small run."""
    if "pages" not in request.fixturenames:
        monkeypatch.setattr(job, "write_report", lambda config, run_dir: None)


@pytest.fixture
def pages() -> None:
    """Asked for by a test whose runs write a page."""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Call the command line in an empty folder: `code, out, err = call("show", "mwn")`; a traceback is a failure."""
    monkeypatch.chdir(tmp_path)
    # `--info` makes Hydra log to the stdout of its moment, which pytest closes; and all that it does from then on,
    # for which it composes each config twice more.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    levels = {logger: logger.level for logger in (root, logging.getLogger("hydra"))}
    # A process of its own would forget the folders of the files that it was given.
    monkeypatch.setattr("mlotool.config.recipes.named_folders", [])

    def run(*words: str) -> Result:
        capfd.readouterr()
        code = main(words)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    yield run
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Write a recipe: `recipe("seed: 3", name="mine")` gives folder/mine.yaml, a plain classifier with these lines."""

    def write(lines: str = "", name: str = "mine") -> Path:
        file = tmp_path / "folder" / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# @package _global_\n# A test's recipe.\ndefaults: [plain, _self_]\n{lines}\n")
        return file

    return write
