"""A disk that is full, workers that die, memory that is not there: a sentence, and the last good checkpoint stays."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool.runner
from mlotool.core.errors import CheckpointError, ConfigError, WriteError
from mlotool.core.user_code import UserCodeError
from mlotool.runner import RunResult, run_config
from mlotool.runner.checkpoint import read_checkpoint, write_checkpoint
from mlotool.runner.folder import RunFolder
from tests.runner.tiny import make_built, make_config

Run = Callable[..., RunResult]
SHORT = {"runner.max_ticks": 10}


@contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """Let the system refuse what makes a file larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint({"x": torch.zeros(3)}, path)
    before = path.read_bytes()
    with (
        full_disk(50_000),
        pytest.raises(WriteError, match=r"last\.ckpt: cannot be written \(.*\); expected room for it"),
    ):
        write_checkpoint({"x": torch.zeros(100_000)}, path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_run_goes_on_once_there_is_space_again(tiny_run: Run, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(tick: int, value: float) -> bool:
        # metrics.csv and summary.json still fit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000 if tick >= 20 else soft, hard))
        return False

    whole = tiny_run(folder="whole").output_dir
    parts = tmp_path / "run"
    try:
        with pytest.raises(WriteError, match=r"\.ckpt: cannot be written \(File too large\)"):
            tiny_run({"runner.checkpoint_seconds": 1e-9}, watch=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads((parts / "summary.json").read_text())["status"] == "failed"
    assert 0 < read_checkpoint(parts / "checkpoints/last.ckpt")["tick"] <= 20
    assert not list(parts.rglob("*.tmp"))
    tiny_run({"resume": str(parts)})
    assert (parts / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    ours, theirs = (read_checkpoint(each / "checkpoints/last.ckpt")["program"] for each in (parts, whole))
    for name, module in theirs["classifier"]["module"].items():
        assert torch.equal(ours["classifier"]["module"][name], module)


def test_a_folder_that_vanishes_ends_the_run_in_one_sentence(tiny_run: Run, tmp_path: Path) -> None:

    def remove(tick: int, value: float) -> bool:
        shutil.rmtree(tmp_path / "run")
        return False

    # Warnings are errors here: there is nothing beside the one sentence.
    with pytest.raises(
        WriteError, match=r"run.*: cannot be written \(No such file.*expected the folder that was there"
    ):
        tiny_run(watch=remove)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["artifacts", "checkpoints"])
def test_a_folder_that_could_not_be_taken_is_free_again(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("a file")
    with pytest.raises(WriteError, match=rf"run/{name}: cannot be written \(File exists\)"):
        RunFolder.create(make_config(), tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    assert RunFolder.create(make_config(), tmp_path / "run").path == tmp_path / "run"


def another_version(state: dict[str, Any]) -> None:
    del state["mlotool"]["program"]["classifier"]["optimizer"]


def no_window(state: dict[str, Any]) -> None:
    del state["mlotool"]["window"]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (another_version, r"last\.ckpt does not fit the problems of its .* \(state\.classifier: found \{module"),
        (no_window, r"found no checkpoint in .* that can be read: .*last\.ckpt .* has no 'mlotool\.window'"),
        (
            None,
            r"found no checkpoint in .*, while metrics\.csv has values; expected the checkpoints that the run wrote",
        ),
    ],
)
def test_a_wrong_checkpoint_is_refused_and_costs_nothing(tiny_run: Run, spoil: Any, text: str) -> None:
    folder = tiny_run(SHORT).output_dir
    (folder / "checkpoints/best.ckpt").unlink()
    last = folder / "checkpoints/last.ckpt"
    if spoil is None:
        last.unlink()
    else:
        content = torch.load(last, weights_only=True)
        spoil(content)
        torch.save(content, last)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match=text):
        tiny_run({"runner.max_ticks": 20, "resume": str(folder)})
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ConfigError if spoil is None else CheckpointError, match=r"last"):
        mlotool.runner.load(folder, "classifier", "last")


def test_the_best_checkpoint_serves_where_the_last_is_gone(tiny_run: Run) -> None:
    whole = tiny_run({"runner.max_ticks": 20}, folder="whole").output_dir
    folder = tiny_run(SHORT).output_dir
    (folder / "checkpoints/last.ckpt").unlink()
    tiny_run({"runner.max_ticks": 20, "resume": str(folder)})
    assert (folder / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()


def test_memory_that_an_evaluation_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_built()

    def forward(module: torch.nn.Module, inputs: Any) -> None:
        # The rehearsal takes no more samples than a batch of the evaluation has; the first one is its.
        calls.append(module.training)
        if calls.count(False) > 2:
            raise MemoryError

    calls: list[bool] = []
    built.program.problems["classifier"].module.register_forward_pre_hook(forward)
    monkeypatch.setattr(run_config, "build", lambda config, reduce, shared: built)
    with pytest.raises(UserCodeError, match=r"evaluate\.problem: .*Expected room for it in the memory"):
        mlotool.runner.run(make_config(**SHORT), output_dir=tmp_path / "run")
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["tick"] == 0
