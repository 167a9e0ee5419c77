import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlotool.core.errors import ConfigError
from mlotool.report import write_report
from tests.report.html_check import read_page
from tests.report.run_folders import mwn_config, mwn_rows, mwn_summary, problem, weight_arrays, write_metrics, write_run

FEW_ROWS = [(1, "classifier/loss", 2.3), (2, "classifier/loss", 2.1), (2, "val/accuracy", 0.1)]


def test_the_page_and_the_figures_of_a_finished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arrays=weight_arrays())
    page = read_page(write_report(run))
    for text in (
        "mwn",
        "finished",
        "objective val/accuracy 0.9371",
        "best checkpoint at tick 800",
        "1 min 12 s",
        "test: 0.9127 at tick 1000.",
        "best 0.9371 at 800",
        "best checkpoint (tick 800)",
        "AUC 0.9731",
        "implicit · identity · finite difference",
        "WeightNet",
        "SGD · lr 0.1 · 5 steps",
        "mlotool run +recipe=mwn seed=0 problems.classifier.optimizer.lr=0.1",
        "0123456789abcdef0123456789abcdef01234567 with uncommitted changes",
        "torch 2.9.0",
        "Resolved config",
        "Recipe file",
        "# @package _global_",
    ):
        assert text in page.text, text
    assert "Notes on this folder" not in page.text

    names = {file.name: file.read_bytes() for file in (run / "report").iterdir()}
    assert set(names) == {
        "loss-reweight.svg",
        "loss-classifier.svg",
        "training-gradient_norm.svg",
        "training-lr.svg",
        "evaluation-accuracy.svg",
        "evaluation-loss.svg",
        "weights-against-loss.svg",
        "weights-histogram.svg",
    }
    assert all(content.startswith(b"<svg ") and len(content) > 3000 for content in names.values())


def test_a_report_is_written_again_over_the_old_one_byte_for_byte(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=FEW_ROWS)
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert len(list((run / "report").iterdir())) == 2


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = "</script></style><img src=x onerror=alert(1)>\"'&$\\frac{"
    config = mwn_config()
    config["name"] = evil
    config["problems"] = {
        evil: problem(evil, 0.1),
        "_$hidden": problem("MLP", 0.1, optimizer={"_target_": evil, "lr": evil}),
    }
    config["graph"] = {"upper_to_lower": {evil: ["_$hidden"]}, "lower_to_upper": {"_$hidden": [evil, "unknown"]}}
    rows = [
        (tick, f"{name}/{metric}", 1.0 / tick)
        for tick in (1, 2)
        for name in config["problems"]
        for metric in ("loss", "lr", evil)
    ]
    summary = mwn_summary() | {"status": "failed", "error": evil, "metrics": {f"{evil}/loss": evil}}
    run = write_run(tmp_path / "run", config=config, rows=rows, summary=summary, recipe=f"name: {evil}\n")
    (run / "overrides.txt").write_text(evil)
    (run / "provenance.json").write_text(json.dumps({"command": evil, "device": evil, "git": evil, "versions": [evil]}))
    page = read_page(write_report(run))
    assert "img" not in page.tags
    assert page.text.count("<img src=x onerror=alert(1)>") >= 5


def test_figures_of_hostile_names_stay_in_their_folder(tmp_path: Path) -> None:
    rows = [(1, "classifier/../../x", 1.0), (1, "classifier/..//..//x", 2.0), (1, "reweight/.", 2.0)]
    run = write_run(tmp_path / "a" / "run", rows=rows)
    write_report(run)
    assert {file.suffix for file in (run / "report").iterdir()} == {".svg"}
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["run"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("missing", ["config.yaml", "recipe.yaml", "summary.json", "metrics.csv"])
def test_a_missing_file_leaves_the_rest(tmp_path: Path, missing: str) -> None:
    run = write_run(tmp_path / "run", rows=FEW_ROWS)
    (run / missing).unlink()
    page = read_page(write_report(run))
    assert "Final metrics" in page.text
    if missing == "summary.json":
        assert "no summary" in page.text
    if missing in ("config.yaml", "provenance.json", "summary.json"):
        assert f"{missing} is missing" in page.text


@pytest.mark.parametrize("text", ["{", "!!python/object:os.system {}", "\x00\x01"])
def test_a_broken_file_leaves_the_rest(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run", rows=[])
    for name in ("config.yaml", "provenance.json", "summary.json", "recipe.yaml", "overrides.txt", "metrics.csv"):
        (run / name).write_text(text)
    (run / "artifacts" / "weights.npz").write_text(text)
    assert "run" in read_page(write_report(run)).text


def test_a_failed_run_shows_its_error_and_its_last_finite_values(tmp_path: Path) -> None:
    error = "The loss of problem 'classifier' became nan at tick 320; expected a finite number."
    summary = {"status": "failed", "objective": {"key": "val/accuracy", "value": None, "mode": "max"}, "error": error}
    rows = [
        (t, key, float("nan") if key == "classifier/loss" and t > 300 else v)
        for t, key, v in mwn_rows(400)
        if "loss" in key
    ]
    page = read_page(write_report(write_run(tmp_path / "run", rows=rows, summary=summary)))
    assert error in page.text
    assert "failed" in page.text
    assert "no best checkpoint" in page.text
    assert "classifier: 10 values were not finite, first at tick 310" in page.text


@pytest.mark.parametrize("values", [[float("nan")] * 3, [float("inf"), 1.0, -float("inf")], [1e300, 1e-300, 0.0]])
def test_extreme_values_still_give_a_page(tmp_path: Path, values: list[float]) -> None:
    keys = ("classifier/loss", "val/accuracy", "reweight/lr")
    rows = [(tick, key, value) for tick, value in enumerate(values) for key in keys]
    arrays = {"loss": np.array(values), "weight": np.array(values)}
    read_page(write_report(write_run(tmp_path / "run", rows=rows, arrays=arrays)))


def test_unreadable_lines_are_counted_and_the_rest_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[(1, "classifier/loss", 2.3), (2, "classifier/loss", 2.1)])
    with (run / "metrics.csv").open("a") as out:
        out.write("3,classifier/loss\nx,y,z\nnan,classifier/loss,1\n4,classifier/lo")
    page = read_page(write_report(run))
    assert "metrics.csv has 4 lines that could not be read." in page.text
    assert (run / "report" / "loss-classifier.svg").is_file()


def test_a_huge_file_gives_a_small_page(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    run = write_run(tmp_path / "run", rows=[])
    write_metrics(run, ((tick, "classifier/loss", value) for tick, value in enumerate(values.tolist())))
    assert len(read_page(write_report(run)).source) < 300_000


def test_many_keys_are_not_all_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.report.run_page.MAX_SERIES", 3)
    run = write_run(tmp_path / "run", rows=[(1, f"classifier/m{index}", 1.0) for index in range(9)])
    assert "9 keys; only the first 3 are drawn" in read_page(write_report(run)).text
    assert not (run / "report" / "training-m3.svg").exists()


@pytest.mark.parametrize("change", ["no clean", "one sample", "other name"])
def test_weight_artifacts(tmp_path: Path, change: str) -> None:
    arrays = weight_arrays(1 if change == "one sample" else 400)
    if change == "no clean":
        del arrays["clean"]
    run = write_run(tmp_path / "run", rows=[], arrays=arrays)
    if change == "other name":
        (run / "artifacts" / "weights.npz").rename(run / "artifacts" / "difficulty.npz")
    page = read_page(write_report(run))
    assert "who got which weight" in page.text
    assert ("wrong label" in page.text) == (change == "other name")
    assert ("difficulty: weight against loss" in page.text) == (change == "other name")


@pytest.mark.parametrize(("low", "high", "are_equal"), [(0.999, 1.0, True), (0.9, 1.0, False)])
def test_weights_alone_are_drawn_and_called_equal_where_they_are(
    tmp_path: Path, low: float, high: float, *, are_equal: bool
) -> None:
    run = write_run(tmp_path / "run", rows=[], arrays={"weight": np.linspace(low, high, 40)})
    page = read_page(write_report(run))
    assert "who got which weight" in page.text and "weight against loss" not in page.text
    assert ("All weights are within 1% of each other" in page.text) == are_equal


def test_artifacts_that_are_no_weights_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[], arrays={"loss": np.zeros(3), "weight": np.zeros(4)})
    np.savez(run / "artifacts" / "other.npz", confusion=np.eye(3))
    page = read_page(write_report(run))
    assert "artifacts/weights.npz could not be drawn" in page.text
    assert "other.npz" not in page.text
    assert "who got which weight" not in page.text


@pytest.mark.parametrize("found", ["no such folder", "a file", "an empty folder", "a folder with notes.txt"])
def test_what_is_no_run_folder_is_refused(tmp_path: Path, found: str) -> None:
    path = tmp_path / "run"
    if found == "a file":
        path.write_text("x")
    elif found != "no such folder":
        path.mkdir()
    if found.startswith("a folder"):
        (path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=f"found {found}; expected .* Give the folder"):
        write_report(path)


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[])
    code = (
        "import sys; from pathlib import Path; from mlotool.report import write_report\n"
        f"write_report(Path({str(run)!r}))\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'lightning', 'pytorch_lightning', 'wandb'} & set(sys.modules)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
