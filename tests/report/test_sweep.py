import csv
import json
from pathlib import Path

import pytest

from mlotool.core.errors import ConfigError
from mlotool.report import sweep_rows, write_sweep_summary


def write_job(folder: Path, status: str | None, value: float | None, overrides: str) -> None:
    folder.mkdir(parents=True)
    (folder / "overrides.txt").write_text(overrides)
    if status is not None:
        summary = {"status": status, "objective": {"key": "val/accuracy", "value": value, "mode": "max"}}
        (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_job(tmp_path / "10", "interrupted", 0.5, "seed=10\n")
    write_job(tmp_path / "2", "failed", None, "seed=2\nproblems.classifier.optimizer.lr=1e9\n")
    write_job(tmp_path / "0", "finished", 0.9371, "seed=0\n")
    write_job(tmp_path / "1", None, None, "seed=1\n")
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
    assert rows[2].overrides == "seed=2 problems.classifier.optimizer.lr=1e9"
    assert rows[0].objective == "val/accuracy"
    assert rows[4].folder == sweep / "10"


def test_the_summary_is_a_csv_file_beside_the_jobs(sweep: Path) -> None:
    file = write_sweep_summary(sweep)
    assert file == sweep / "sweep.csv"
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["job", "overrides", "status", "objective", "value", "folder", "error"]
    assert [row["value"] for row in rows] == ["0.9371", "", "", "", "0.5"]
    assert write_sweep_summary(sweep).read_text() == file.read_text()


def test_a_broken_summary_is_an_unfinished_job(sweep: Path) -> None:
    (sweep / "0" / "summary.json").write_text('{"status": "fin')
    assert sweep_rows(sweep)[0].status == "unfinished"


@pytest.mark.parametrize("exists", [False, True])
def test_what_is_no_sweep_is_refused(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "sweep"
    if exists:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"found .*; expected .* Give the folder"):
        write_sweep_summary(path)


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "=1+1", 0.5, "+problems.classifier.x==HYPERLINK(1)\n")
    write_job(tmp_path / "1", "@x", -0.5, "-1\n")
    with write_sweep_summary(tmp_path).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["overrides"] for row in rows] == ["'+problems.classifier.x==HYPERLINK(1)", "'-1"]
    assert [row["status"] for row in rows] == ["'=1+1", "'@x"]
    assert [row["value"] for row in rows] == ["0.5", "-0.5"]
