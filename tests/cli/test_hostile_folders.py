"""Run folders of a stranger: whichever verb reads one, nothing outside is read or written, and it ends soon."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import mlotool
from mlotool.core.errors import MlotoolError
from tests.cli import hostile_checkpoints, hostile_configs, hostile_links
from tests.cli.conftest import Result
from tests.cli.hostile_folders import FOLDERS, SECRET
from tests.cli.spoiled import Spoil, made_by, spoiling

Call = Callable[..., Result]
SECONDS, SECONDS_OF_WAITING = 10, 60
"""Of this process's own work, of which two are usual, most for the drawing; and by the clock, for what waits."""

assert hostile_checkpoints and hostile_configs and hostile_links

# Of each kind one; all of them with `-m slow`.
QUICK = (
    "a_recipe_behind_a_link",
    "pages_behind_links",
    "checkpoints_behind_a_link",
    "pipes",
    "a_billion_laughs",
    "a_config_that_looks_elsewhere",
    "commands_to_the_terminal",
    "a_checkpoint_that_expands",
    "a_checkpoint_that_asks_for_all_memory",
    "a_checkpoint_of_lists_in_lists",
    "a_checkpoint_whose_keys_collide",
    "a_checkpoint_of_two_lists",
    "a_config_of_a_model_larger_than_its_checkpoint",
    "links_to_the_environment",
    "names_that_are_no_texts",
    "nodes_behind_a_link",
    "nodes_of_a_tangle",
    "nodes_of_two_rows",
)
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FOLDERS]
WORDS = (
    "run",
    "plain",
    "runner.accelerator=cpu",
    "logger.wandb=false",
    "runner.report=false",
    "runner.progress_bar=false",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ticks, below work/outputs/plain."""
    return made_by([*WORDS, "runner.max_ticks=2"], tmp_path_factory)


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoil]:
    """Spoil a copy of the run by a builder's name; in the end nothing outside has changed."""
    with spoiling(FOLDERS, whole, "outputs/plain", tmp_path, monkeypatch) as spoil:
        yield spoil


@contextmanager
def in_time(what: object) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still there after {SECONDS_OF_WAITING} s: {what}")

    before, began = signal.signal(signal.SIGALRM, late), time.process_time()
    signal.alarm(SECONDS_OF_WAITING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - began < SECONDS, what


def test_there_are_many() -> None:
    assert len(FOLDERS) >= 150


@pytest.mark.parametrize("name", EVERY)
def test_nothing_outside_is_read_or_written(name: str, folder: Spoil, call: Call) -> None:
    run = folder(name)
    os.chdir(run.parents[2])
    for words in (
        ("evaluate", str(run), "--split", "test"),
        ("report", str(run)),
        (*WORDS, "runner.max_ticks=3", f"resume={run}"),
    ):
        with in_time(words):
            code, out, err = call(*words)
        assert code in (0, 1, 2), words
        assert "not foreseen" not in err, err
        assert code == 0 or "xpected" in err or "Correct" in err, err
        assert SECRET not in out + err
        assert all(each.isprintable() or each in "\n\t" for each in out + err)
        assert len(out + err) < 20_000
    for file in run.rglob("*"):
        # A page or a table; no checkpoint as large as a disk.
        if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1 and file.stat().st_size < 10**8:
            assert SECRET.encode() not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_load_and_auto(name: str, folder: Spoil, call: Call) -> None:
    run = folder(name)
    os.chdir(run.parents[2])
    with in_time("load"):
        try:
            module = mlotool.load(run, "classifier")
        except MlotoolError as error:
            assert SECRET not in str(error)
            assert "xpected" in str(error) or "Correct" in str(error)
        else:
            assert isinstance(module, torch.nn.Module)
    with in_time("auto"):
        code, out, err = call(*WORDS, "runner.max_ticks=3", "resume=auto")
    assert code in (0, 1, 2)
    assert "not foreseen" not in err, err
    assert SECRET not in out + err
    assert all(each.isprintable() or each in "\n\t" for each in out + err)


def test_the_users_own_folder_says_more_when_the_user_does(folder: Spoil, call: Call) -> None:
    run = folder("a_config_that_downloads")
    os.chdir(run.parents[2])
    words = ("evaluate", str(run), "--split", "test")
    code, _, err = call(*words)
    assert code == 2
    assert "config.yaml: data.download: found True; expected nothing that downloads" in err
    assert "say so: data.download=true behind the run folder" in err
    wrong = call(*words, "data.downlod=true")
    assert wrong[0] == 2
    assert "Did you mean 'data.download'?" in wrong[2]
