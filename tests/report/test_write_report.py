"""The page of a run: what it says and draws, and what a folder of a stranger's, or a broken one, may do."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.dom.minidom import parseString

import numpy as np
import pytest

from docs.generated import committed_run
from mlotool.core.errors import ConfigError
from mlotool.report import write_report
from mlotool.report.formats import NONE
from tests.report.html_check import read_page
from tests.report.run_folders import mwn_config, mwn_rows, mwn_summary, problem, weight_arrays, write_run

FEW_ROWS = [(1, "classifier/loss", 2.3), (2, "classifier/loss", 2.1), (2, "val/accuracy", 0.1)]


def test_the_gallery_keeps_figures_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", arrays=weight_arrays())
    write_report(run)
    monkeypatch.setattr(committed_run, "RUNS", tmp_path / "runs")
    folder = committed_run.keep(run)
    kept = json.loads((folder / "run.json").read_text())
    assert folder.name == "mwn" and kept["figures"][0] == "weights-against-loss.svg"
    for name in kept["figures"]:
        assert (folder / name).read_bytes() == (run / "report" / name).read_bytes()


def test_the_page_and_the_figures_of_a_finished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arrays=weight_arrays())
    page = read_page(write_report(run))
    assert write_report(run).read_text() == page.source, "written again it is the same, byte for byte"
    for text in (
        *("mwn", "finished", "objective val/accuracy 0.9371", "best checkpoint at tick 800", "1 min 12 s"),
        *("test: 0.9127 at tick 1000.", "best 0.9371 at 800", "best checkpoint (tick 800)", "AUC 0.9731", "median"),
        "Constant learning rate: reweight 0.001.",
        *("implicit · identity · finite difference", "WeightNet", "SGD · lr 0.1 · 5 steps", "torch 2.9.0"),
        "mlotool run +recipe=mwn seed=0 problems.classifier.optimizer.lr=0.1",
        "0123456789abcdef0123456789abcdef01234567 with uncommitted changes",
        *("Resolved config", "Recipe file", "# @package _global_"),
    ):
        assert text in page.text, text
    assert "Notes on this folder" not in page.text

    drawn = {file.stem: file.read_bytes() for file in (run / "report").iterdir()}
    names = "loss-reweight loss-classifier training-gradient_norm training-lr evaluation-accuracy evaluation-loss"
    assert set(drawn) == {*names.split(), "weights-against-loss", "weights-histogram"}
    assert all(
        parseString(content).documentElement.tagName == "svg" and len(content) > 3000 for content in drawn.values()
    )
    # Of its kinds of marks one is the star at the best value.
    assert drawn["evaluation-accuracy"].count(b"<path id=") == drawn["evaluation-loss"].count(b"<path id=") + 1


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = "</script></style><img src=x onerror=alert(1)>\"'&$\\frac{"
    config = mwn_config()
    config["name"] = evil
    hidden = problem("MLP", 0.1, optimizer={"_target_": evil, "lr": evil})
    config["problems"] = {evil: problem(evil, 0.1), "_$hidden": hidden}
    config["graph"] = {"upper_to_lower": {evil: ["_$hidden"]}, "lower_to_upper": {"_$hidden": [evil, "unknown"]}}
    keys = [f"{name}/{metric}" for name in config["problems"] for metric in ("loss", "lr", evil)]
    rows = [(tick, key, 1.0 / tick) for tick in (1, 2) for key in keys]
    summary = mwn_summary() | {"status": "failed", "error": evil, "metrics": {f"{evil}/loss": evil}}
    run = write_run(tmp_path / "run", config=config, rows=rows, summary=summary, recipe=f"name: {evil}\n")
    (run / "overrides.txt").write_text(evil)
    (run / "provenance.json").write_text(json.dumps({"command": evil, "device": evil, "git": evil, "versions": [evil]}))
    page = read_page(write_report(run))
    assert "img" not in page.tags and page.text.count("<img src=x onerror=alert(1)>") >= 5


def test_what_is_evaluated_in_the_end_stands_under_the_best_checkpoint(tmp_path: Path) -> None:
    rows = [*FEW_ROWS, (1000, "weights/wrong_label_auc", 0.9731), (800, "test/accuracy", 0.9)]
    page = read_page(write_report(write_run(tmp_path / "run", rows=rows)))
    table = re.findall(r'<tr><th scope="row">([^<]*)</th><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td></tr>', page.source)
    assert ("accuracy", NONE, "0.9127") in table and ("wrong_label_auc", NONE, "0.9731") in table
    assert "test: 0.9 at the best checkpoint (tick 800)." in page.text


def test_what_upper_problems_learned_is_drawn_one_card_a_problem(tmp_path: Path) -> None:
    for num, is_named in ((3, True), (32, False)):
        rows = [(tick, f"reweight/learned_value_{place}", place + tick / 10) for tick in (1, 2) for place in range(num)]
        page = read_page(write_report(write_run(tmp_path / str(num), rows=[*FEW_ROWS, *rows])))
        assert f"reweight: the {num} learned values" in page.text
        assert (f"value {num - 1}" in page.text) is is_named


def test_a_missing_or_broken_file_leaves_the_rest(tmp_path: Path) -> None:
    files = ("config.yaml", "provenance.json", "summary.json", "recipe.yaml", "overrides.txt", "metrics.csv")
    for missing in files:
        run = write_run(tmp_path / missing, rows=FEW_ROWS)
        (run / missing).unlink()
        page = read_page(write_report(run))
        assert (f"{missing} is missing" in page.text) is (missing in files[:3])
        assert ("no summary" in page.text) is (missing == "summary.json")
    for text in ("!!python/object:os.system {}", "\x00\x01"):
        for name in (*files, "artifacts/weights.npz"):
            (run / name).write_text(text)
        assert "config.yaml could not be read" in read_page(write_report(run)).text


def test_a_failed_run_shows_its_error_and_its_last_finite_values(tmp_path: Path) -> None:
    error = "The loss of problem 'classifier' became nan at tick 320; expected a finite number."
    summary = {"status": "failed", "objective": {"key": "val/accuracy", "value": None, "mode": "max"}, "error": error}
    losses = [row for row in mwn_rows(400) if "loss" in row[1]]
    rows = [(t, key, float("nan") if key == "classifier/loss" and t > 300 else v) for t, key, v in losses]
    page = read_page(write_report(write_run(tmp_path / "run", rows=rows, summary=summary)))
    for text in (error, "failed", "no best checkpoint", "classifier: 10 values were not finite, first at tick 310"):
        assert text in page.text


def test_extreme_values_still_give_a_page(tmp_path: Path) -> None:
    for values in ([float("nan")] * 3, [float("inf"), 1.0, -float("inf")], [1e300, 1e-300, 0.0]):
        rows = [(tick, key, value) for tick, value in enumerate(values) for key in ("classifier/loss", "val/accuracy")]
        arrays = {"loss": np.array(values), "weight": np.array(values)}
        read_page(write_report(write_run(tmp_path / str(values[0]), rows=rows, arrays=arrays)))


def test_unreadable_lines_and_many_keys_are_counted_and_the_rest_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlotool.report.run_page.MAX_SERIES", 3)
    run = write_run(tmp_path / "run", rows=[*FEW_ROWS, *((1, f"classifier/m{index}", 1.0) for index in range(7))])
    with (run / "metrics.csv").open("a") as out:
        out.write("3,classifier/loss\nx,y,z\nnan,classifier/loss,1\n4,classifier/lo")
    page = read_page(write_report(run))
    assert "metrics.csv has 4 lines that could not be read." in page.text
    assert "9 keys; only the first 3 are drawn" in page.text
    assert (run / "report" / "loss-classifier.svg").is_file() and not (run / "report" / "training-m3.svg").exists()


def test_weights_of_other_forms_and_of_a_warm_up(tmp_path: Path) -> None:
    arrays, summary = weight_arrays(400), mwn_summary()
    summary["best"]["metrics"]["reweight/step"] = 0
    run = write_run(tmp_path / "a", rows=[], arrays=arrays, summary=summary)
    (run / "artifacts" / "weights.npz").rename(run / "artifacts" / "difficulty.npz")
    page = read_page(write_report(run))
    assert "difficulty: weight against loss" in page.text and "wrong label" in page.text
    assert "No step had been made at the best checkpoint (tick 800) by reweight: the figures show" in page.text
    del arrays["clean"]
    for each in (arrays, {"weight": arrays["weight"][:1]}):
        text = read_page(write_report(write_run(tmp_path / str(len(each)), rows=[], arrays=each))).text
        assert "distribution of the weights" in text and "wrong label" not in text and "No step" not in text


def test_artifacts_that_are_no_weights_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[], arrays={"loss": np.zeros(3), "weight": np.zeros(4)})
    np.savez(run / "artifacts" / "other.npz", confusion=np.eye(3))
    page = read_page(write_report(run))
    assert "artifacts/weights.npz could not be drawn" in page.text
    assert "other.npz" not in page.text and "distribution of the weights" not in page.text


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, found in (("nowhere", "no such folder"), ("file", "a file"), ("empty", "another folder")):
        with pytest.raises(ConfigError, match=f"found {found}; expected .* Give the folder"):
            write_report(tmp_path / name)


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[])
    code = (
        "import sys; from pathlib import Path; from mlotool.report import write_report\n"
        f"write_report(Path({str(run)!r}))\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'lightning', 'pytorch_lightning', 'wandb'} & set(sys.modules)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
