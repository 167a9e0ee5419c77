"""Runs side by side."""

from pathlib import Path
from typing import Any

import pytest

from mlotool.cli.main import main
from mlotool.core.errors import ConfigError
from mlotool.report.compared_runs import RunComparison, write_comparison
from tests.report.html_check import read_page
from tests.report.run_folders import mwn_config, mwn_summary, write_plan, write_run

SWITCH = ("classifier", "optimizer", "lr")
CURVE = [(tick, "val/accuracy", tick / 1000) for tick in (100, 200, 300)]


def write(folder: Path, lr: float, best: int, shift: float = 0.0, **config: Any) -> Path:
    """Write a run with its best checkpoint at a tick, at which `test` was evaluated in the end."""
    values = mwn_config() | config
    values["problems"]["classifier"]["optimizer"]["lr"] = lr
    rows = [(tick, key, value + shift) for tick, key, value in CURVE]
    rows += [(tick, "classifier/loss", 1 / tick) for tick in (100, 200, 300)]
    rows += [(best, "test/accuracy", 0.5 + shift)]
    summary = mwn_summary() | {"best": {"tick": best, "metrics": {"val/accuracy": best / 1000 + shift}}}
    summary["objective"]["value"] = best / 1000 + shift
    return write_run(folder, config=values, rows=rows, summary=summary)


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / "a", 0.1, 200), write(tmp_path / "b", 0.3, 300, 0.01)]


def test_settings_that_differ_and_metrics_with_their_ticks(two: list[Path]) -> None:
    comparison = RunComparison(two)
    assert comparison.settings == {"problems.classifier.optimizer.lr": [0.1, 0.3]}
    assert comparison.labels == ["A: lr=0.1", "B: lr=0.3"]

    def found(which: str) -> dict[str, list[tuple[float, float]]]:
        return {key: [(x.value, x.tick) for x in row if x] for key, row in comparison.metrics(which).items()}

    best, last = found("best"), found("last")
    assert best["val/accuracy"] == [(0.2, 200), (pytest.approx(0.31), 300)]
    assert best["test/accuracy"] == [(0.5, 200), (0.51, 300)]
    # It is of the best checkpoints in both runs already.
    assert "test/accuracy" not in last
    assert last["val/accuracy"] == [(pytest.approx(0.3), 300), (pytest.approx(0.31), 300)]
    assert [run.objective and run.objective.tick for run in comparison.runs] == [200, 300]
    assert list(comparison.curves) == ["val/accuracy", "classifier/loss"]


def test_a_default_that_an_older_config_lacks_is_no_difference(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a", 0.1, 200), write(tmp_path / "b", 0.1, 200, inherit=None, decisions_from=None)]
    assert RunComparison(runs).settings == {}
    assert RunComparison(runs).labels == ["A", "B"]


def test_the_page(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = write(tmp_path / "c", 0.1, 200, name="<b>x</b>", objective_mode="min")
    assert main(["compare", *map(str, two), str(hostile), "--out", str(tmp_path / "pages" / "x.html")]) == 0
    out = capsys.readouterr().out
    assert "problems.classifier.optimizer.lr" in out and "0.31 at 300" in out and "classifier/loss" not in out
    page = read_page(tmp_path / "pages" / "x.html")
    assert page.tags.count("figure") == 2 and "<b>x" not in page.source and "0.31 at 300" in page.text
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["x.html"]


def test_broken_runs_are_compared_as_far_as_they_can_be_read(two: list[Path], tmp_path: Path) -> None:
    (two[0] / "config.yaml").write_text("{")
    (two[1] / "metrics.csv").write_text("tick,key,value\n100,val/accuracy,nan\nx\n")
    (two[1] / "summary.json").unlink()
    page = read_page(write_comparison(RunComparison(two), tmp_path / "x.html"))
    assert "config.yaml could not be read" in page.text and "metrics.csv has 1 line that could not be read" in page.text


def test_what_cannot_be_compared(two: list[Path], tmp_path: Path) -> None:
    write_plan(tmp_path / "sweep", 2)
    for folders, words in (
        (two[:1], "found 1 run"), ([two[0], tmp_path / "a"], "twice"), ([two[0], tmp_path / "none"], "no such folder"),
        ([two[0], tmp_path / "sweep"], "the folder of a sweep"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            RunComparison(folders)
    assert main(["compare", *map(str, two), "--out", "x.txt"]) == 2
