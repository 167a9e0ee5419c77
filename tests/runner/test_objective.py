"""What a run is judged by, the right way round: best checkpoint, early stopping, the folders of older versions."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlotool.runner
from mlotool.core.errors import ConfigError
from mlotool.report import write_report
from mlotool.runner import RunResult
from mlotool.runner.checkpoint import BestCheckpoint, read_checkpoint
from tests.runner.tiny import make_config

Run = Callable[..., RunResult]
ERROR = {"objective": "val/cross_entropy", "evaluate.splits": {"val": 5}}
# The rate is so high that the classifier gets worse in the end.
WORSE = {**ERROR, "runner.max_ticks": 40}


def evaluations(folder: Path, key: str) -> dict[int, float]:
    with (folder / "metrics.csv").open(newline="") as lines:
        return {int(row["tick"]): float(row["value"]) for row in csv.DictReader(lines) if row["key"] == key}


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(("key", "best", "mode"), [("val/cross_entropy", min, "min"), ("val/accuracy", max, "max")])
def test_the_best_checkpoint_is_the_best_evaluation(tiny_run: Run, key: str, best: Any, mode: str) -> None:
    result = tiny_run({**WORSE, "objective": key})
    values = evaluations(result.output_dir, key)
    assert len(set(values.values())) > 2
    tick = best(values, key=values.__getitem__)
    assert result.checkpoint is not None
    assert read_checkpoint(result.checkpoint)["tick"] == tick
    assert result.objective == pytest.approx(values[tick])
    assert summary_of(result.output_dir)["objective"] == {"key": key, "value": result.objective, "mode": mode}


def test_early_stopping_waits_for_a_smaller_error(tiny_run: Run) -> None:
    result = tiny_run({**ERROR, "runner.max_ticks": 30, "runner.early_stopping_patience": 1})
    values = list(evaluations(result.output_dir, "val/cross_entropy").values())
    assert values[1] < values[0]
    assert len(values) > 2


def test_nan_is_never_the_best(tmp_path: Path) -> None:
    class Round:
        is_cut = False

    class Fit:
        def __init__(self) -> None:
            self.callback_metrics: dict[str, float] = {}
            self.written: list[float] = []

        def save_checkpoint(self, path: Path) -> None:
            self.written.append(self.callback_metrics["val/error"])

    fit, best = Fit(), BestCheckpoint(tmp_path / "best.ckpt", "val/error", "min")
    for value in (float("nan"), 3.0, float("nan"), 4.0, 2.0):
        fit.callback_metrics["val/error"] = value
        best.on_train_epoch_end(fit, Round())  # type: ignore[arg-type]
    assert fit.written == [3.0, 2.0]


@pytest.fixture
def old_folder(tiny_run: Run) -> Path:
    """A run folder of a version that maximised an error because nobody had said otherwise."""
    folder = tiny_run(ERROR).output_dir
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "objective_mode": "max"}))
    summary = summary_of(folder)
    summary["objective"]["mode"] = "max"
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_an_older_run_the_wrong_way_round_is_not_gone_on_with(
    old_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**ERROR, "runner.max_ticks": 40}
    with pytest.raises(ConfigError, match=r"objective_mode=max with objective=val/cross_entropy.*worst evaluation"):
        mlotool.runner.run(make_config(**changes), resume=old_folder)
    outputs = tmp_path / "outputs" / "tiny"
    outputs.mkdir(parents=True)
    old_folder.rename(outputs / "2026-01-31_12-00-00")
    monkeypatch.chdir(tmp_path)
    result = mlotool.runner.run(make_config(**changes), resume="auto")
    assert result.output_dir.name != "2026-01-31_12-00-00"
    assert "has objective_mode=max" in capsys.readouterr().err


def test_an_older_run_the_wrong_way_round_is_read_and_says_so(old_folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"that of the worst evaluation\. Use checkpoints/last\.ckpt, or run"):
        page = write_report(old_folder).read_text()
    assert "smaller is better" in page
    assert "larger is better" not in page
    assert "that of the worst evaluation" in page


def test_the_best_checkpoint_of_such_a_run_is_evaluated_with_a_warning(old_folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"best.ckpt is that of the WORST"):
        found = mlotool.runner.evaluate(old_folder, "val")
    assert found.keys() == {"val/accuracy", "val/cross_entropy"}
    assert mlotool.runner.evaluate(old_folder, "val", "last").keys() == found.keys()
