"""A sweep whose jobs share a process, as it is typed."""

import csv
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests.cli.test_sweep import PATIENT_LOSS, begin

WORDS = ["run", "-m", "+recipe=plain", "debug=fast", "logger=csv", "problems.classifier.module.hidden=[4]"]


def sweep_of(folder: Path) -> Path:
    [sweep] = (folder / "outputs" / "plain" / "multirun").iterdir()
    return sweep


def rows_of(sweep: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_job_that_is_refused_does_not_end_those_beside_it(tmp_path: Path) -> None:
    words = [*WORDS, "seed=0,-1,2", "problems.classifier.optimizer.lr=0.1,1e30", "sweep.fuse=4", "runner.max_ticks=10"]
    code = begin(words, tmp_path).wait()
    errors, sweep = (tmp_path / "errors.txt").read_text(), sweep_of(tmp_path)
    assert code == 1, errors
    rows = rows_of(sweep)
    assert [row["status"] for row in rows] == ["finished", "failed", "failed", "failed", "finished", "failed"]
    assert all(rows[number]["error"].startswith("seed: found -1") for number in (2, 3))
    assert all("became nan" in rows[number]["error"] for number in (1, 5))
    assert "6 jobs, up to 4 in a process" in errors
    assert "4 of 6 jobs of the sweep failed: 1, 2, 3, 5" in errors
    assert read(sweep, "groups.json") == {"groups": [[0, 1, 2, 3], [4, 5]]}
    # A job in a group is a run like any other, but for its page, which is made when it is asked for.
    expected = {"config.yaml", "metrics.csv", "summary.json", "provenance.json", "overrides.txt", "recipe.yaml"}
    assert expected <= {each.name for each in (sweep / "4").iterdir()}
    assert not (sweep / "4" / "report.html").exists() and "4/report.html" not in (sweep / "sweep.html").read_text()
    assert (sweep / "4" / "overrides.txt").read_text().split()[-2:] == [
        "seed=2",
        "problems.classifier.optimizer.lr=0.1",
    ]


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_signal_with_the_same_groups(tmp_path: Path) -> None:
    (tmp_path / "patient").mkdir()
    (tmp_path / "patient" / "__init__.py").write_text(PATIENT_LOSS)
    words = [*WORDS, "--trust", "patient", "problems.classifier.loss._target_=patient.loss", "sweep.fuse=2"]
    words += ["debug.limit_ticks=400", "runner.max_ticks=400", "runner.checkpoint_seconds=0.05", "seed=0,1,2"]
    words += ["resume=auto"]
    first = begin(words, tmp_path)
    multirun, until = tmp_path / "outputs" / "plain" / "multirun", time.monotonic() + 120
    # Not while the runs begin, which takes no tick.
    while not any(read_checkpoint(path)["tick"] for path in multirun.glob("*/0/checkpoints/last.ckpt")):
        assert first.poll() is None, (tmp_path / "errors.txt").read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    code, errors = first.wait(), (tmp_path / "errors.txt").read_text()
    assert code == 130, errors
    assert "go on with it: the same command with resume=outputs/plain/multirun" in errors
    sweep = sweep_of(tmp_path)
    before = read(sweep / "0", "summary.json")
    assert before["status"] == "interrupted"
    assert read(sweep, "groups.json") == {"groups": [[0, 1]]}
    # As though the second job had ended when the sweep was interrupted.
    (sweep / "1").mkdir(exist_ok=True)
    (sweep / "1" / "summary.json").write_text('{"status": "failed", "error": "by hand"}')

    (tmp_path / "patient" / "go").touch()
    code, errors = begin(words, tmp_path).wait(), (tmp_path / "errors.txt").read_text()
    assert code == 1, errors
    assert "1 of 3 jobs done" in errors
    assert read(sweep_of(tmp_path), "groups.json") == {"groups": [[0, 1], [2]]}
    assert [row["status"] for row in rows_of(sweep)] == ["finished", "failed", "finished"]
    [resume] = read(sweep / "0", "provenance.json")["resumes"]
    assert 0 < before["num_ticks"] == resume["tick"]
    assert rows_of(sweep)[1]["error"] == "by hand"
