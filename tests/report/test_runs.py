"""The table of the runs below a folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlotool.cli.main import main
from mlotool.core.errors import ConfigError
from mlotool.report.runs import UNREADABLE, find_runs
from tests.report.run_folders import mwn_config, mwn_rows, mwn_summary, provenance, write_begun, write_job, write_plan
from tests.report.run_folders import write_run as write_whole_run


def write_run(folder: Path, value: float, started: str = "2025-01-31T10:00:00", **config: Any) -> Path:
    summary = mwn_summary() | {"training_s": 100 * value}
    summary["objective"]["value"] = value
    write_whole_run(folder, config=mwn_config() | config, summary=summary, rows=mwn_rows(20))
    (folder / "provenance.json").write_text(json.dumps(provenance() | {"started": started}))
    return folder


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, a sweep of three jobs, and what is no run."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs"
    write_run(folder / "mwn" / "a", 0.9, "2025-01-31T10:00:00")
    write_run(folder / "mwn" / "b", 0.8, "2025-02-01T10:00:00", seed=7)
    write_run(folder / "maml" / "c", 0.7, "2025-01-01T10:00:00", name="maml")
    sweep = folder / "mwn" / "multirun" / "s"
    write_plan(sweep, 3)
    write_job(sweep / "0", "seed=0", value=0.3)
    write_job(sweep / "1", "seed=1", value=0.2)
    write_begun(sweep / "2", "seed=2")
    (folder / "notes").mkdir()
    (folder / "mwn" / "linked").symlink_to(folder / "maml" / "c")
    return folder


def folders(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert main(["runs", *words, "--json"]) == 0
    return [row["folder"] for row in json.loads(capsys.readouterr().out)]


def test_each_run_and_job_has_a_row_and_no_link_is_followed(outputs: Path) -> None:
    rows = {row.folder.relative_to(outputs).as_posix(): row for row in find_runs(outputs)}
    assert set(rows) == {"mwn/a", "mwn/b", "maml/c", *(f"mwn/multirun/s/{job}" for job in range(3))}
    run, job = rows["mwn/a"], rows["mwn/multirun/s/1"]
    assert (run.name, run.status, run.objective, run.value, run.best_tick) == (
        "mwn",
        "finished",
        "val/accuracy",
        0.9,
        800,
    )
    assert (run.num_ticks, run.training_s, run.started, run.fault) == (1000, 90.0, "2025-01-31T10:00:00", "")
    assert (job.name, job.value, job.mode, job.sweep) == ("mwn", 0.2, "min", outputs / "mwn/multirun/s")
    assert rows["mwn/multirun/s/2"].status == "unfinished"
    with pytest.raises(ConfigError, match="no such folder"):
        find_runs(outputs / "none")


def test_filters_and_orders(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = "outputs/mwn/a", "outputs/mwn/b", "outputs/maml/c"
    sweep = "outputs/mwn/multirun/s"
    assert folders(capsys)[:3] == [b, a, c]
    assert folders(capsys, "--sort", "time")[:3] == [a, b, c]
    assert folders(capsys, "--sort", "objective") == [a, b, c, f"{sweep}/1", f"{sweep}/0", f"{sweep}/2"]
    assert folders(capsys, "--name", "ma*") == [c]
    assert folders(capsys, "--status", "unfinished") == [f"{sweep}/2"]
    # As the command line has written it, and as the config has it.
    assert folders(capsys, "--where", "seed=1") == [f"{sweep}/1"]
    assert folders(capsys, "--where", "seed=7", "--where", "problems.classifier.optimizer.lr=1e-1") == [b]
    assert folders(capsys, "outputs/maml") == [c]
    assert folders(capsys, "--sweeps", "--sort", "objective") == [a, b, c, sweep]
    assert main(["runs", "--limit", "1", "--sweeps"]) == 0
    out = capsys.readouterr().out
    assert "outputs/mwn/b" in out and "... and 3 more" in out
    assert main(["runs", "--sweeps", "--name", "mwn", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[-1]
    # The mean over the seeds, and not the best of them.
    assert (row["value"], row["status"]) == (0.25, "2 finished, 1 unfinished")
    assert "seed" not in row["overrides"]
    # Of some jobs alone it is the best of these.
    assert main(["runs", "--sweeps", "--where", "seed=0", "--json"]) == 0
    assert [row["value"] for row in json.loads(capsys.readouterr().out)][-1] == 0.3


def test_broken_folders_have_a_row_that_says_so(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "mwn/a/summary.json").write_text('{"status": "finished", "objective": [')
    (outputs / "mwn/b/config.yaml").unlink()
    os.mkfifo(outputs / "mwn/b/config.yaml")
    (outputs / "maml/c/provenance.json").unlink()
    (outputs / "maml/c/provenance.json").symlink_to("/etc/hostname")
    (outputs / "mwn/multirun/s/0/summary.json").write_text('{"status": 3, "objective": {"value": "x", "mode": {}}}')
    rows = {row.folder.name: row for row in find_runs(outputs)}
    for name, words in {"a": "something else than a JSON object", "b": "a special file", "c": "leads out"}.items():
        assert rows[name].status == UNREADABLE and words in rows[name].fault
    assert (rows["0"].value, rows["0"].mode, rows["0"].status) == (None, "", "3")
    assert main(["runs"]) == 0
    assert "outputs/mwn/a: summary.json could not be read" in capsys.readouterr().out
