"""What the end of a search says: two objectives, draws that were made before, and draws that make no model."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mlotool.cli.show_sweep import show_sweep
from mlotool.cli.sweep import exit_code
from mlotool.core.errors import RunError
from mlotool.report import write_sweep_page, write_sweep_summary
from tests.report.html_check import read_page
from tests.report.sweep_folders import write_job
from tests.report.test_search_page import KEY, SCRIPT, job, search

TWO = {"second_objective": "classifier/num_parameters", "second_mode": "min"}


def printed(folder: Path, width: int = 160) -> str:
    out = io.StringIO()
    show_sweep(folder, Console(file=out, width=width, highlight=False, markup=False, emoji=False))
    return out.getvalue()


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def refused(folder: Path, number: int, error: str, *words: str) -> None:
    write_job(folder / str(number), *words, status="infeasible", error=error, **KEY)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Four jobs, of which the first two are on the front."""
    folder = search(tmp_path / "two", 4, **TWO)
    for number, (value, size) in enumerate([(0.9, 500), (0.8, 100), (0.8, 200), (0.7, 100)]):
        job(folder, number, value, f"+decisions.kernel_0=k{number}", "+decisions.norm=layer", num_parameters=size)
    return folder


@pytest.mark.parametrize("width", [60, 160])
def test_both_objectives_and_the_front_are_in_the_terminal(two: Path, width: int) -> None:
    head, *rows = printed(two, width).strip().splitlines()[:5]
    assert head.split()[0] == "job"
    assert [each for each in head.split() if each.startswith(("val", "num"))] == ["val/accuracy", "num_parameters"]
    assert ["front" in line for line in rows] == [True, True, False, False]
    assert "finished, best, front" in rows[0]
    assert [str(size) in line.split() for line, size in zip(rows, (500, 100, 200, 100), strict=True)] == [True] * 4


def test_the_front_has_lines_of_its_own(two: Path) -> None:
    text = printed(two)
    both = "val/accuracy (larger is better) and classifier/num_parameters (smaller is better)"
    assert f"Pareto front of {both}: 2 of 4 jobs\n" in text
    own = "val/accuracy 0.8, classifier/num_parameters 100: +decisions.kernel_0=k1 +decisions.norm=layer"
    assert f"  job 1: {own}\n" in text


def test_the_front_is_a_column_of_sweep_csv(two: Path) -> None:
    rows = table(write_sweep_summary(two))
    assert [row["on_front"] for row in rows] == ["true", "true", "false", "false"]
    assert [row["second_value"] for row in rows] == ["500", "100", "200", "100"]
    assert {row["second_objective"] for row in rows} == {"classifier/num_parameters"}


def test_one_objective_has_no_such_columns(tmp_path: Path) -> None:
    folder = search(tmp_path / "one", 2)
    for number in range(2):
        job(folder, number, 0.5, f"+decisions.kernel_0=k{number}")
    assert "on_front" not in table(write_sweep_summary(folder))[0]
    assert "Pareto" not in printed(folder)


def test_the_front_of_settings_with_seeds(tmp_path: Path) -> None:
    folder = search(tmp_path / "seeds", 4, repeats=2, **TWO)
    for number, (value, size) in enumerate([(0.9, 500), (0.7, 500), (0.6, 600), (0.5, 600)]):
        words = (f"+decisions.kernel_0=k{number // 2}", f"seed={number % 2}")
        job(folder, number, value, *words, num_parameters=size)
    text = printed(folder)
    assert ": 1 of 2 settings\n  jobs 0, 1: val/accuracy 0.8, classifier/num_parameters 500: +decisions.kernel" in text
    assert [row["on_front"] for row in table(write_sweep_summary(folder))] == ["true", "true", "false", "false"]
    settings = table(folder / "settings.csv")
    assert [(row["second_mean"], row["on_front"]) for row in settings] == [("500.0", "true"), ("600.0", "false")]


def test_the_best_job_has_the_decisions_that_all_jobs_share(tmp_path: Path) -> None:
    folder = search(tmp_path / "alike", 3)
    for number in range(3):
        job(folder, number, 0.5 + 0.1 * number, f"lr={number}", "+decisions.kernel_0=k5", "+decisions.norm=layer")
    expected = "best: job 2, val/accuracy 0.7 (larger is better): lr=2 +decisions.kernel_0=k5 +decisions.norm=layer"
    assert expected in printed(folder)


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_search_with_one_model_has_its_decisions(tmp_path: Path, num_seeds: int) -> None:
    folder = search(tmp_path / "one", num_seeds, repeats=num_seeds)
    for seed in range(num_seeds):
        words = [f"seed={seed}"] if num_seeds > 1 else []
        job(folder, seed, 0.5, "+decisions.kernel_0=k5", *words)
    [line] = [each for each in printed(folder).splitlines() if "larger is better" in each]
    assert line.endswith("larger is better): +decisions.kernel_0=k5")
    assert "+decisions.kernel_0=k5" in read_page(write_sweep_page(folder), SCRIPT).text


def test_draws_that_were_made_before_are_counted(tmp_path: Path) -> None:
    ending = "the search ends with 2 of 9 jobs: the last 100 draws were all of known points"
    folder = search(tmp_path / "same", 2, num_same=107, ending=ending)
    for number in range(2):
        job(folder, number, 0.5 + number, f"+decisions.kernel_0=k{number}")
    notes = (
        f"T{ending[1:]}.",
        "Draws of points that jobs have already, whose results they take untrained: 107.",
    )
    text, page = printed(folder), read_page(write_sweep_page(folder), SCRIPT).text
    assert all(note in text and note in page for note in notes)
    asked = json.loads((folder / "plan.json").read_text())
    asked["search"] |= {"num_same": "many", "ending": [1]}
    (folder / "plan.json").write_text(json.dumps(asked))
    assert "Draws of points" not in printed(folder)


WRONG = "problems.net.module: mutator 'norm': node 'layers.{}' does not take (b, {}). Correct the candidate."
OTHER = "problems.net.module: mutator 'link': found no input."


def refuse_four(folder: Path) -> None:
    """Leave four draws that make no model, three of them for one reason."""
    refused(folder, 0, OTHER, "+decisions.kernel_0=k3", "+decisions.link_0=far")
    for number in (1, 2, 3):
        error = WRONG.format(number, 7 * number)
        refused(folder, number, error, "+decisions.kernel_0=k5", "+decisions.norm_0=wrong", f"+decisions.x={number}")


def test_reasons_of_draws_that_make_no_model_are_counted(tmp_path: Path) -> None:
    folder = search(tmp_path / "mixed", 5)
    refuse_four(folder)
    job(folder, 4, 0.5, "+decisions.kernel_0=k5", "+decisions.norm_0=layer")
    text = printed(folder)
    assert "4 draws make no model (infeasible), untrained, for 2 reasons:" in text
    assert f"  3 of 4: job 1 (each has decisions.norm_0=wrong): {WRONG.format(1, 7)}" in text
    assert f"  1 of 4: job 0: {OTHER}" in text
    assert exit_code(folder) == 0


def test_a_search_without_a_model_says_what_is_at_fault(tmp_path: Path) -> None:
    folder = search(tmp_path / "none", 4)
    refuse_four(folder)
    with pytest.raises(RunError) as caught:
        exit_code(folder)
    text = str(caught.value)
    assert text.startswith(
        "decisions: found no model in all of 4 draws, 3 of them for one reason: job 1 (each has decisions.kernel_0=k5, "
    )
    assert WRONG.format(1, 7) in text
    assert "job 1 has +decisions.kernel_0=k5 +decisions.norm_0=wrong +decisions.x=1. Correct the" in text
