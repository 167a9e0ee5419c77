import csv
import json
from pathlib import Path

import pytest

from mlotool.report import write_sweep_summary
from tests.report.sweep_folders import write_job


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))
    assert {len(row) for row in rows} == {len(rows[0])}, "each line has as many cells as there are columns"
    assert len(set(rows[0])) == len(rows[0]), "a column is found by its head"
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_a_column_is_a_parameter_or_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = {"val/loss": 0.5, "test/accuracy": 0.91, "classifier/loss": 0.2}
    write_job(tmp_path / "0", "+problems.a.optimizer.lr=-0.1", "seed=0", value=-0.25, metrics=metrics)
    write_job(tmp_path / "1", "+problems.a.optimizer.lr=1e-3", "seed=0", status="failed", error="line one\nline two")
    file = write_sweep_summary(tmp_path)
    assert file == tmp_path / "sweep.csv"
    first, second = read(file)
    assert list(first) == [
        "job", "problems.a.optimizer.lr", "recipe", "runner.max_ticks", "seed", "objective", "value",
        "val/loss", "test/accuracy", "classifier/loss", "status", "time_s", "folder", "error",
    ]  # fmt: skip
    assert first == {
        "job": "0", "problems.a.optimizer.lr": "-0.1", "recipe": "mwn", "runner.max_ticks": "60", "seed": "0",
        "objective": "val/loss", "value": "-0.25", "val/loss": "0.5", "test/accuracy": "0.91",
        "classifier/loss": "0.2", "status": "finished", "time_s": "1.5", "folder": "0", "error": "",
    }  # fmt: skip
    assert (second["value"], second["test/accuracy"]) == ("", "")
    assert second["error"] == "line one\\nline two"
    assert not (tmp_path / "settings.csv").exists(), "jobs without seeds are their own settings"
    assert write_sweep_summary(tmp_path).read_text() == file.read_text()


def test_settings_csv_is_a_row_a_setting_the_best_first(tmp_path: Path) -> None:
    for job, (rate, seed, value) in enumerate([(0.1, 0, 0.5), (0.1, 1, 0.7), (1, 0, 0.2), (1, 1, 0.3)]):
        write_job(tmp_path / str(job), f"problems.a.optimizer.lr={rate}", f"seed={seed}", value=value)
    write_sweep_summary(tmp_path)
    best, other = read(tmp_path / "settings.csv")
    assert (best["problems.a.optimizer.lr"], best["mean"], best["is_best"], best["jobs"]) == (
        "1",
        "0.25",
        "true",
        "2 3",
    )
    assert float(best["standard_error"]) == pytest.approx(0.05)
    assert (other["num_seeds"], other["num_planned"], other["is_best"]) == ("2", "2", "false")


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", " =1+1", "\uff1d1+1"])
def test_no_cell_is_a_formula(tmp_path: Path, text: str) -> None:
    write_job(tmp_path / "0", f"problems.classifier.x={text}", value=-0.5, error=text, metrics={text: 1.0})
    write_job(tmp_path / text.replace("/", ""), f"{text.strip()}=1", status=text, value=0.5)
    (tmp_path / text.replace("/", "") / "overrides.txt").write_text(f"\n{text}=1\n")
    with write_sweep_summary(tmp_path).open(newline="", encoding="utf-8") as lines:
        cells = [cell for row in csv.reader(lines) for cell in row]
    assert not [cell for cell in cells if cell.lstrip().startswith(("=", "+", "@", "\uff1d"))]
    assert {cell for cell in cells if cell.startswith("-")} == {"-0.5"}
    assert any(cell.startswith("'") for cell in cells)


@pytest.mark.parametrize("text", ["-1", "-inf", "[a,b]", "a=b"])
def test_a_number_or_a_word_has_no_quote_before_it(tmp_path: Path, text: str) -> None:
    write_job(tmp_path / "0", f"problems.classifier.x={text}", value=-0.5)
    [row] = read(write_sweep_summary(tmp_path))
    assert row["problems.classifier.x"] == text


def test_a_key_with_the_name_of_another_column_has_its_own(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "objective=val/loss", "status=good", value=0.5)
    [row] = read(write_sweep_summary(tmp_path))
    assert (row["objective"], row["objective_2"]) == ("val/loss", "val/loss")
    assert (row["status"], row["status_2"]) == ("good", "finished")


def test_texts_that_no_file_takes_are_escaped(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "x=1", value=0.5)
    summary = {"status": "\ud800", "error": "\x1b[2J\x00", "metrics": {"a\rb": 1}}
    (tmp_path / "0" / "summary.json").write_text(json.dumps(summary))
    [row] = read(write_sweep_summary(tmp_path))
    assert (row["status"], row["error"], row["a\\rb"]) == ("\\ud800", "\\x1b[2J\\x00", "1.0")
