"""The rows of a sweep's jobs, what ran as one program, sweep.csv and settings.csv, whatever its folder holds."""

import csv
import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlotool.core.errors import ConfigError
from mlotool.folders.run_folder import RunFolder
from mlotool.report import sweep_rows, write_sweep_summary
from mlotool.report.compared_runs import ComparedRun
from mlotool.report.formats import NONE
from mlotool.report.recorded_run import RecordedRun
from mlotool.report.sweep import (
    MAX_LINES,
    Column,
    Comparison,
    compare,
    fusion_lines,
    job_command,
    read_plan,
    repeat_command,
    seeds,
    warning_lines,
)
from mlotool.report.sweep_page import write_sweep_page
from tests.report.run_folders import write_begun, write_job, write_plan


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_job(tmp_path / "10", "seed=10", status="interrupted", value=0.5)
    write_job(tmp_path / "2", "seed=2", "problems.classifier.optimizer.lr=1e9", status="failed")
    write_job(tmp_path / "0", "seed=0", value=0.9371)
    write_job(tmp_path / "1", "seed=1", status=None)
    (tmp_path / "3").mkdir()
    (tmp_path / ".hydra").mkdir()
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
    fixed = {"recipe": "mwn", "runner.max_ticks": "60"}
    assert rows[2].parameters == {**fixed, "seed": "2", "problems.classifier.optimizer.lr": "1e9"}
    assert rows[0].objective == "val/loss" and rows[4].folder == sweep / "10"


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
    write_plan(tmp_path, 20)
    assert sweep_rows(tmp_path) == [] and read_plan(tmp_path).num_jobs == 20
    write_begun(tmp_path / "0", "seed=4")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [row] = sweep_rows(tmp_path)
    assert (row.status, row.parameters["seed"]) == ("running", "4")
    assert sweep_rows(tmp_path)[0].status == "unfinished"


def test_summaries_of_other_types_are_read_as_far_as_they_make_sense(tmp_path: Path) -> None:
    for job, summary in enumerate((
        {"status": ["x"], "objective": "text", "metrics": [1], "error": {"a": 1}, "num_ticks": -1},
        {"status": "finished", "objective": {"key": 3, "value": "high", "mode": ["max"]}, "metrics": {"a/b": None}},
        {"status": "finished", "objective": {"key": "a/b", "value": 10**400, "mode": 1}, "num_ticks": 1e400},
    )):  # fmt: skip
        write_job(tmp_path / str(job), value=0.5)
        (tmp_path / str(job) / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "plan.json").write_text('{"keys": [1], "num_jobs": "many", "mode": {}}')
    assert all(isinstance(row.error, str) for row in sweep_rows(tmp_path))
    assert read_plan(tmp_path).num_jobs == 0
    write_sweep_summary(tmp_path)


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"found .*; expected .* Give the folder"):
            write_sweep_summary(path)


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
    first, second = read(write_sweep_summary(tmp_path))
    expected = {
        "job": "0", "problems.a.optimizer.lr": "-0.1", "recipe": "mwn", "runner.max_ticks": "60", "seed": "0",
        "objective": "val/loss", "value": "-0.25", "val/loss": "0.5", "test/accuracy": "0.91",
        "classifier/loss": "0.2", "status": "finished", "time_s": "1.5", "folder": "0", "error": "",
    }  # fmt: skip
    assert first == expected and list(first) == list(expected)
    assert (second["value"], second["test/accuracy"], second["error"]) == ("", "", "line one\\nline two")
    assert not (tmp_path / "settings.csv").exists(), "jobs without seeds are their own settings"


def test_settings_csv_is_a_row_a_setting_the_best_first(tmp_path: Path) -> None:
    for job, (rate, seed, value) in enumerate([(0.1, 0, 0.5), (0.1, 1, 0.7), (1, 0, 0.2), (1, 1, 0.3)]):
        write_job(tmp_path / str(job), f"a.lr={rate}", f"seed={seed}", value=value)
    write_sweep_summary(tmp_path)
    best, other = read(tmp_path / "settings.csv")
    assert (best["a.lr"], best["mean"], best["is_best"], best["jobs"]) == ("1", "0.25", "true", "2 3")
    assert float(best["standard_error"]) == pytest.approx(0.05)
    assert (other["num_seeds"], other["num_planned"], other["is_best"]) == ("2", "2", "false")


def test_a_setting_has_the_mean_of_the_test_split_where_it_is_that_of_the_best_checkpoint(tmp_path: Path) -> None:
    for job, value in enumerate([0.5, 0.7]):
        write_job(
            tmp_path / str(job), "a.lr=1", f"seed={job}", value=value, key="val/loss",
            metrics={"meta/loss": 3.0}, at_best={"test/loss": 2 * value, "test/accuracy": 0.9, "weights/loss": 1.0},
        )  # fmt: skip
    write_sweep_summary(tmp_path)
    (setting,) = read(tmp_path / "settings.csv")
    assert [key for key in setting if "test" in key or "meta" in key or "weights" in key] == [
        "test/loss_mean",
        "test/loss_standard_error",
    ]
    assert float(setting["test/loss_mean"]) == pytest.approx(1.2)
    assert float(setting["test/loss_standard_error"]) == pytest.approx(0.2)


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    for job, text in enumerate(("=1+1", "+cmd|' /C calc'!A0", " =1+1", "\uff1d1+1")):
        write_job(tmp_path / str(job), f"problems.classifier.x={text}", value=-0.5, error=text, metrics={text: 1.0})
        write_job(tmp_path / text.replace("/", ""), f"{text.strip()}=1", status=text, value=0.5)
    with write_sweep_summary(tmp_path).open(newline="", encoding="utf-8") as lines:
        cells = [cell for row in csv.reader(lines) for cell in row]
    assert not [cell for cell in cells if cell.lstrip().startswith(("=", "+", "@", "\uff1d"))]
    assert {cell for cell in cells if cell.startswith("-")} == {"-0.5"}
    assert any(cell.startswith("'") for cell in cells)


def test_numbers_words_and_what_no_file_takes(tmp_path: Path) -> None:
    for job, text in enumerate(("-1", "-inf", "[a,b]", "a=b")):
        write_job(tmp_path / str(job), f"x={text}", "objective=val/loss", "status=good", value=-0.5)
    summary = {"status": "\ud800", "error": "\x1b[2J\x00", "metrics": {"a\rb": 1}}
    (tmp_path / "3" / "summary.json").write_text(json.dumps(summary))
    rows = read(write_sweep_summary(tmp_path))
    assert [row["x"] for row in rows] == ["-1", "-inf", "[a,b]", "a=b"]
    # A key with the name of another column has one of its own.
    assert (rows[0]["objective"], rows[0]["objective_2"]) == ("val/loss", "val/loss")
    assert (rows[0]["status"], rows[0]["status_2"]) == ("good", "finished")
    assert (rows[3]["status_2"], rows[3]["error"], rows[3]["a\\rb"]) == ("\\ud800", "\\x1b[2J\\x00", "1.0")


def write(sweep: Path, content: Any, name: str = "0.json") -> list[str]:
    (sweep / "fusion").mkdir(exist_ok=True)
    (sweep / "fusion" / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return fusion_lines(sweep)


def stack(jobs: Any, is_fused: Any = False, fused_s: Any = None, alone_s: Any = None, reason: Any = "") -> Any:
    return {"jobs": jobs, "is_fused": is_fused, "fused_s": fused_s, "alone_s": alone_s, "reason": reason}


def test_a_stack_is_a_sentence_and_those_of_one_reason_are_together(tmp_path: Path) -> None:
    write(tmp_path, {"stacks": [stack([40, 41], True), stack([38], reason="a\nb"), stack([39], reason="c")]}, "32.json")
    slow = {**stack([6, 7], True, 0.02, 0.01, "a counter"), "until_tick": 40}
    assert write(tmp_path, {"stacks": [stack([0, 1, 2, 5], True, 0.01, 0.019), stack([4], reason="a b"), slow]}) == [
        "jobs 0 to 2, 5 ran as one program (10 ms for the gradients of a tick as one, 19 ms one by one: 1.9 times as "
        "fast)",
        "jobs 4, 38 ran one by one; a b",
        "jobs 6, 7 ran as one program until tick 40, and then one by one in parts (20 ms for the gradients of a tick "
        "as one, 10 ms one by one: 0.5 times as fast); in parts one by one: a counter",
        "job 39 ran one by one; c",
        "jobs 40, 41 ran as one program",
    ]


def test_there_is_an_end(tmp_path: Path) -> None:
    stacks = [stack(list(range(place, 100_000, 2)), True, reason="x" * 10_000) for place in range(3)]
    stacks += [stack([place, place + 1], True) for place in range(3_000)]
    lines = write(tmp_path, {"stacks": stacks})
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == f"{3_003 - MAX_LINES} more such lines are left out: see fusion/*.json."
    assert max(map(len, lines)) < 600


@pytest.mark.parametrize("content", ["", "[]", {"stacks": 3}, {"stacks": [3]}, {"stacks": [stack([-1])]}])
def test_what_is_no_record_says_nothing(content: Any, tmp_path: Path) -> None:
    assert write(tmp_path, content) == []


def test_where_warnings_of_runs_stand(tmp_path: Path) -> None:
    write(tmp_path, {"stacks": []})
    assert warning_lines(tmp_path) == []
    for name, text in (("0", "mlotool: warning: a\n"), ("4", "mlotool: going on\n"), ("8", "mlotool: warning: d\n")):
        (tmp_path / "fusion" / f"{name}.log").write_text(text)
    assert warning_lines(tmp_path) == ["warnings of runs: fusion/0.log, fusion/8.log"]


def grid(folder: Path, values: dict[str, list[float | None]], key: str = "seed", mode: str = "min") -> Comparison:
    cells = [(rate, seed, value) for rate, row in values.items() for seed, value in enumerate(row)]
    for job, (rate, seed, value) in enumerate(cells):
        status, words = "failed" if value is None else "finished", (f"a.lr={rate}", f"{key}={seed}")
        write_job(folder / str(job), *words, status=status, value=value, mode=mode, key="val/score")
    return compare(folder)


def best_jobs(folder: Path) -> str | None:
    best = compare(folder).best
    return None if best is None else best.jobs


@pytest.mark.parametrize(("key", "mode", "best"), [("seed", "min", "0.1"), ("data.seed", "max", "1")])
def test_jobs_that_differ_in_the_seed_are_one_setting(tmp_path: Path, key: str, mode: str, best: str) -> None:
    # The best job, 0.1 and 3.0, is not of the best setting.
    comparison = grid(tmp_path, {"0.1": [1.0, 1.2, 1.4], "1": [0.9, 2.0, 3.0]}, key, mode)
    assert comparison.seed_keys == (key,) and [column.key for column in comparison.columns] == ["a.lr"]
    assert comparison.best is not None and comparison.best.parameters == {"a.lr": best}
    first = comparison.settings[0]
    assert (first.mean, first.standard_error) == (pytest.approx(1.2), pytest.approx(0.2 / 3**0.5))
    assert (seeds(first), first.jobs) == ("3 seeds", "0, 1, 2")


def test_a_job_that_repeats_a_setting_and_a_seed_is_no_further_sample(tmp_path: Path) -> None:
    for job, (rate, seed, value) in enumerate(
        [("0.1", 0, 1.0), ("0.1", 1, 2.0), ("0.1", 1, 2.0), ("1", 0, 3.0), ("1", 0, 3.0), ("0.1", 1, None)]
    ):
        status = "failed" if value is None else "finished"
        write_job(tmp_path / str(job), f"a.lr={rate}", f"seed={seed}", status=status, value=value)
    comparison = compare(tmp_path)
    first, second = comparison.settings
    assert (first.values, first.mean, first.standard_error) == ((1.0, 2.0), 1.5, pytest.approx(0.5))
    assert (seeds(first), first.jobs) == ("2 seeds", "0, 2")
    assert (second.values, second.standard_error, seeds(second)) == ((3.0,), None, "1 seed")
    [note] = comparison.notes
    assert note == "Not counted, as another job has the same setting and the same seed: 1, 3, 5."
    assert note in write_sweep_page(tmp_path, comparison).read_text()


def test_a_setting_that_lost_seeds_is_not_the_best_one(tmp_path: Path) -> None:
    comparison = grid(tmp_path, {"0.1": [1.0, 1.2, 1.4], "1": [0.1, None, 0.1], "9": [None, None, None]})
    assert comparison.best is comparison.settings[0] and seeds(comparison.settings[1]) == "2 of 3 seeds"
    assert [setting.parameters["a.lr"] for setting in comparison.ranked] == ["0.1", "1"]
    [note] = comparison.notes
    assert note.startswith(
        "A setting with 2 of 3 seeds has a better mean, 0.1, but not all of its jobs have finished: a.lr=1"
    )


def test_seeds_that_have_not_begun_are_counted(tmp_path: Path) -> None:
    write_plan(tmp_path, 6, seed=3, **{"a.lr": 2})
    for job, rate in enumerate(("0.1", "1")):
        write_job(tmp_path / str(job), f"a.lr={rate}", "seed=0", value=0.5 + job)
    comparison = compare(tmp_path)
    assert comparison.best is not None and seeds(comparison.best) == "1 of 3 seeds"
    assert (comparison.num_ended, comparison.num_jobs) == (2, 6)
    assert comparison.notes == ["No setting has all of its jobs yet; the best one has 1 of 3 seeds."]


def test_only_finite_values_of_the_same_objective_are_compared(tmp_path: Path) -> None:
    for job, value in enumerate([float("nan"), float("-inf"), -1e300, 0.5, 0.5]):
        write_job(tmp_path / str(job), f"a={job}", value=value)
    write_job(tmp_path / "5", "a=5", value=0.1, key="train/loss")
    assert best_jobs(tmp_path) == "3"
    same = "1 other setting has exactly the same value."
    assert compare(tmp_path).notes == [same, "Jobs with another objective are not compared: train/loss."]


def test_a_job_that_has_only_begun_makes_no_constant_a_hyperparameter(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "a.lr=0.1", value=0.5)
    write_begun(tmp_path / "1", "a.lr=0.2")
    (tmp_path / "2").mkdir()
    comparison = compare(tmp_path)
    assert [(column.key, column.numbers) for column in comparison.columns] == [("a.lr", (0.1, 0.2))]
    assert comparison.constants == {"recipe": "mwn", "runner.max_ticks": "60"}


def test_the_direction_is_that_of_the_metric_then_of_the_plan(tmp_path: Path) -> None:
    for job in range(8):
        words = (f"seed={job % 2}", f"data.seed={job // 2 % 2}", f"lr={job // 4}")
        write_job(tmp_path / "a" / str(job), *words, value=float(job), key="val/loss", mode="max")
    # Several kinds of seed are samples too.
    assert best_jobs(tmp_path / "a") == "0, 1, 2, 3"
    write_plan(tmp_path / "b", 3)
    write_begun(tmp_path / "b" / "0", "a=1")
    assert (compare(tmp_path / "b").objective, compare(tmp_path / "b").mode) == ("val/loss", "min")


def test_columns_have_numbers_by_size_before_words() -> None:
    column = Column("a", "a", ("10", "null", "9", "1e-3", None))
    assert column.numbers is None and column.names == ["1e-3", "9", "10", "null", NONE]
    for texts, is_drawn, is_log in ((("0.01", "1"), False, True), (("1", "2"), False, False), (("1", "2"), True, True)):
        assert Column("a", "a", texts, is_drawn_by_logarithm=is_drawn).is_log is is_log
    assert not Column("a", "a", ("0", "2"), is_drawn_by_logarithm=True).is_log


def test_one_line_trains_the_best_setting_once_more(tmp_path: Path) -> None:
    """With its recipe's path, packages and seeds, and without what belongs to the sweep."""
    for number, (rate, seed, value) in enumerate([(0.1, 0, 0.9), (0.1, 1, 0.8), (0.2, 0, 0.1), (0.2, 1, 0.2)]):
        write_job(tmp_path / str(number), f"a.lr={rate}", f"seed={seed}", "data.root=my data", value=value)
        command = "mlotool run -m my/mwn.yaml --trust rings sweep.workers=2"
        (tmp_path / str(number) / "provenance.json").write_text(json.dumps({"command": command}))
    comparison = replace(compare(tmp_path), mode="max")
    line = "mlotool run -m --trust rings my/mwn.yaml runner.max_ticks=60 a.lr=0.1 'data.root=my data' seed=0,1"
    assert repeat_command(comparison) == line
    write_sweep_summary(tmp_path, comparison)
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["command"] == line
    assert repeat_command(replace(comparison, mode="")) == ""


def test_of_a_population_the_line_has_the_settings_that_its_best_state_was_trained_by(tmp_path: Path) -> None:
    """The best checkpoint is of tick 800: what the member copied later is left out."""
    for number, value in enumerate((0.5, 0.9)):
        path = write_job(tmp_path / str(number), f"a.lr={number + 1}", value=value) / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "best": {"tick": 800}}))
    content = {
        "rules": {"interval": 1, "fraction": 0.5, "resample": 0, "factor": 2, "seed": 0, "mode": "max"},
        "dimensions": [{"key": "a.lr"}],
        "settings": [{"a.lr": 1.0}, {"a.lr": 2.0}],
        "ticks": [300, 900],
        "copies": [
            {"tick": tick, "member": 1, "source": 0, "settings": {"a.lr": rate}, "value": 0, "source_value": 1}
            for tick, rate in ((300, 0.5), (900, 0.25))
        ],
    }
    (tmp_path / "population.json").write_text(json.dumps(content))
    comparison = replace(compare(tmp_path), mode="max")
    line = "mlotool run mwn runner.max_ticks=60 a.lr=1.0 'runner.changes={300: {a.lr: 0.5}}'"
    assert repeat_command(comparison) == line
    member = RecordedRun(RunFolder(tmp_path / "1"))
    assert job_command(member) == line
    (tmp_path / "1" / "config.yaml").write_text("a: {lr: 2.0}\n")
    assert ComparedRun("A", member.folder.path).settings["a.lr"] == "1.0, from tick 300: 0.5"
    write_sweep_summary(tmp_path, comparison)
    with (tmp_path / "sweep.csv").open() as file:
        assert [row["copied"] for row in csv.DictReader(file)] == ["", "0 at 300, 0 at 900"]
