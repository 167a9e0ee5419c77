"""A disk that is full, files that are in the way, checkpoints that do not fit: a sentence, and nothing is lost."""

import functools
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool.runner
from mlotool.core.errors import CheckpointError, ConfigError, WriteError
from mlotool.runner import RunResult
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.folder import RunFolder
from tests.runner.tiny import make_config

Run = Callable[..., RunResult]
SHORT = {"runner.max_ticks": 10}


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


def test_a_folder_that_could_not_be_taken_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "artifacts").write_text("a file")
    with pytest.raises(WriteError, match=r"run/artifacts: cannot be written \(File exists\)"):
        RunFolder.create(make_config(), tmp_path / "run")
    (tmp_path / "run" / "artifacts").unlink()
    assert RunFolder.create(make_config(), tmp_path / "run").path == tmp_path / "run"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            ("program", "classifier", "optimizer"),
            r"last\.ckpt does not fit the problems of its .* \(state\.classifier: found \{module",
        ),
        (("window",), r"found no checkpoint in .* that can be read: .*last\.ckpt .* has no 'mlotool\.window'"),
        (None, r"found no checkpoint in .*, while metrics\.csv has values; expected the checkpoints that the run"),
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
        *path, lost = spoil
        del functools.reduce(dict.__getitem__, path, content["mlotool"])[lost]
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
