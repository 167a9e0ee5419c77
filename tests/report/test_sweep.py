import fcntl
import json
import os
from pathlib import Path

import pytest

from mlotool.core.errors import ConfigError
from mlotool.report import sweep_rows, write_sweep_summary
from mlotool.report.sweep import read_plan
from tests.report.sweep_folders import write_begun, write_job, write_plan


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_job(tmp_path / "10", "seed=10", status="interrupted", value=0.5)
    write_job(tmp_path / "2", "seed=2", "problems.classifier.optimizer.lr=1e9", status="failed")
    write_job(tmp_path / "0", "seed=0", value=0.9371)
    write_job(tmp_path / "1", "seed=1", status=None)
    (tmp_path / "3").mkdir()
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "multirun.yaml").write_text("x: 1\n")
    return tmp_path


def test_every_job_has_a_row_in_the_order_of_its_number(sweep: Path) -> None:
    rows = sweep_rows(sweep)
    assert [(row.job, row.status, row.value) for row in rows] == [
        ("0", "finished", 0.9371),
        ("1", "unfinished", None),
        ("2", "failed", None),
        ("3", "unfinished", None),
        ("10", "interrupted", 0.5),
    ]
    assert rows[2].parameters == {
        "recipe": "mwn",
        "runner.max_ticks": "60",
        "seed": "2",
        "problems.classifier.optimizer.lr": "1e9",
    }
    assert rows[0].objective == "val/loss"
    assert rows[4].folder == sweep / "10"


def test_a_job_whose_folder_is_held_is_running(sweep: Path) -> None:
    folders = [os.open(sweep / name, os.O_RDONLY) for name in ("0", "1", "10")]
    try:
        for each in folders:
            fcntl.flock(each, fcntl.LOCK_EX)
        assert {row.job: row.status for row in sweep_rows(sweep)} == {
            "0": "finished", "1": "running", "2": "failed", "3": "unfinished", "10": "running"
        }  # fmt: skip
    finally:
        for each in folders:
            os.close(each)


def test_jobs_of_a_sweep_that_lives_have_begun(tmp_path: Path) -> None:
    write_begun(tmp_path / "0", "seed=4")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [row] = sweep_rows(tmp_path)
    assert (row.status, row.parameters["seed"]) == ("running", "4")
    assert sweep_rows(tmp_path)[0].status == "unfinished"


@pytest.mark.parametrize(
    "summary",
    [
        {"status": ["x"], "objective": "text", "metrics": [1], "error": {"a": 1}, "num_ticks": -1},
        {"status": "finished", "objective": {"key": 3, "value": "high", "mode": ["max"]}, "metrics": {"a/b": None}},
        {"status": "finished", "objective": {"key": "a/b", "value": 10**400, "mode": 1}, "num_ticks": 1e400},
    ],
)
def test_a_summary_of_other_types_is_read_as_far_as_it_makes_sense(tmp_path: Path, summary: dict[str, object]) -> None:
    write_job(tmp_path / "0", value=0.5)
    (tmp_path / "0" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "plan.json").write_text('{"keys": [1], "num_jobs": "many", "mode": {}}')
    [row] = sweep_rows(tmp_path)
    assert isinstance(row.error, str)
    assert read_plan(tmp_path).num_jobs == 0
    write_sweep_summary(tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_what_is_no_sweep_is_refused(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "sweep"
    if exists:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"found .*; expected .* Give the folder"):
        write_sweep_summary(path)


def test_a_sweep_whose_jobs_have_not_begun_is_one(tmp_path: Path) -> None:
    write_plan(tmp_path, 20)
    assert sweep_rows(tmp_path) == []
    assert read_plan(tmp_path).num_jobs == 20


def test_a_job_behind_a_link_that_leads_out_is_none(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_job(other / "5", "secret=1", value=0.1)
    (sweep / "5").symlink_to(other / "5")
    (sweep / "1" / "summary.json").symlink_to(other / "5" / "summary.json")
    rows = sweep_rows(sweep)
    assert [row.job for row in rows] == ["0", "1", "2", "3", "10"]
    assert (rows[1].status, rows[1].value) == ("unfinished", None)
