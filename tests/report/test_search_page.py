"""A search over model spaces: its page, and what the end of a sweep says in the terminal, with its tables."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mlotool.cli.sweep import exit_code
from mlotool.cli.verbs.report import show_sweep
from mlotool.core.errors import RunError
from mlotool.report import write_report, write_sweep_summary
from mlotool.report.search import best_so_far, front, points, random_baseline
from mlotool.report.sweep import compare
from tests.report.html_check import read_page
from tests.report.html_check import read_sweep_page as read
from tests.report.run_folders import residual, write_job, write_nodes
from tests.report.test_sweep import read as table

KEY = {"key": "val/accuracy", "mode": "max"}
TWO = {"second_objective": "classifier/num_parameters", "second_mode": "min"}
REASON = "mutator 'kernel': node 'add' does not take what it is given: <b>x</b>"


def search(folder: Path, num_jobs: int, **settings: Any) -> Path:
    """Write what a search was asked for."""
    folder.mkdir(parents=True)
    asked = {"sampler": "tpe", "repeats": 1, "second_objective": None, "second_mode": None, **settings}
    plan = {"objective": "val/accuracy", "mode": "max", "num_jobs": num_jobs, "keys": {}, "search": asked}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def job(folder: Path, number: int, value: float, *words: str, num_parameters: int = 100) -> Path:
    path = write_job(folder / str(number), *words, value=value, **KEY)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "num_parameters": {"classifier": num_parameters}}))
    return path


def refused(folder: Path, number: int, *words: str, error: str = REASON) -> None:
    path = write_job(folder / str(number), *words, status="infeasible", error=error, **KEY)
    (path / "report.html").unlink()


def printed(folder: Path, width: int = 160) -> str:
    out = io.StringIO()
    show_sweep(folder, Console(file=out, width=width, highlight=False, markup=False, emoji=False))
    return out.getvalue()


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = search(tmp_path / "explore" / "multirun" / "b", 5)
    for number, kernel in enumerate(("k3", "k5", "k1")):
        job(folder, number, 0.7 + 0.1 * number, f"+decisions.kernel_0={kernel}", "+decisions.kernel_1=k3")
    refused(folder, 3, "+decisions.kernel_0=k7")
    refused(folder, 4, "+decisions.kernel_0=k9")
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Four jobs, of which the first two are on the front, and one without a model."""
    folder = search(tmp_path / "two", 5, **TWO)
    for number, (value, size) in enumerate([(0.9, 500), (0.8, 100), (0.8, 200), (0.7, 100)]):
        job(folder, number, value, f"+decisions.kernel_0=k{number}", "+decisions.norm=layer", num_parameters=size)
    refused(folder, 4, "+decisions.kernel_0=k9")
    return folder


def test_draws_that_make_no_model_are_no_failures(sweep: Path) -> None:
    page = read(sweep)
    assert "5 of 5 3 finished, 2 infeasible" in page.text and "failed" not in page.text
    assert "2 draws make no model, and were not trained" in page.text and REASON in page.text
    assert re.search(r'<span class="state"><span aria-hidden="true">∅</span> infeasible</span>', page.source)
    assert "infeasible: its decisions make no working model" in read_page(write_report(sweep / "3")).text
    assert exit_code(sweep) == 0
    write_job(sweep / "5", status="failed", error="nan", **KEY)
    with pytest.raises(RunError, match="1 of 6 jobs of the sweep failed: 5"):
        exit_code(sweep)
    assert "1 of 6 failed" in read(sweep).text


def test_decisions_that_only_some_jobs_have(tmp_path: Path) -> None:
    folder = search(tmp_path / "a", 12)
    for number in range(12):
        depth = 1 + number // 3
        words = [f"+decisions.depth={depth}", f"+decisions.kernel_0=k{number % 3}"]
        # The second kernel is there where the depth is, and the same then.
        words += ["+decisions.kernel_1=k5"] if depth > 2 else []
        job(folder, number, 0.5 + 0.1 * (number % 3) + 0.01 * depth, *words)
    comparison = compare(folder)
    assert [column.label for column in comparison.columns] == ["depth", "kernel_0", "kernel_1"]
    assert "decisions.kernel_1" not in comparison.constants
    page = read(folder)
    importance = page.source.partition("Importance of the hyperparameters")[2].partition("</figure>")[0]
    assert {"kernel_0", "kernel_1", "depth"} <= set(re.findall(r">([\w.]+)</text>", importance))
    assert "a decision that was not asked for counts as a value" in page.text
    assert "+decisions.depth=4 +decisions.kernel_0=k2 +decisions.kernel_1=k5" in page.text


def test_the_best_model_is_shown(sweep: Path) -> None:
    write_nodes(sweep / "2", residual(3, [1]), {"kernel_0": "k5"})
    write_nodes(sweep / "0", residual(3, [0, 1]))
    page = read(sweep)
    assert "Best model" in page.text and "15 nodes, 1 of them changed" in page.text
    assert page.source.count('class="node changed"') == 1


def test_two_objectives_have_a_front_on_the_page_and_in_the_tables(two: Path, sweep: Path) -> None:
    page = read(two)
    assert "2 of 4 settings are on the front: none is better in both objectives." in page.text
    rows = page.source.partition("<h2>Pareto front</h2>")[2].partition("</table>")[0]
    assert rows.count("<tr") == 3 and "k1" in rows and "k2" not in rows
    assert (two / "report" / "pareto.svg").is_file()
    written = table(write_sweep_summary(two))
    assert [row["on_front"] for row in written] == ["true", "true", "false", "false", "false"]
    assert [row["second_value"] for row in written[:4]] == ["500", "100", "200", "100"]
    assert {row["second_objective"] for row in written} == {"classifier/num_parameters"}
    assert "on_front" not in table(write_sweep_summary(sweep))[0] and "Pareto" not in printed(sweep)


@pytest.mark.parametrize("width", [60, 160])
def test_both_objectives_and_the_front_are_in_the_terminal(two: Path, width: int) -> None:
    text = printed(two, width)
    head, *rows = text.strip().splitlines()[:5]
    assert [word for word in head.split() if word.startswith(("val", "num"))] == ["val/accuracy", "num_parameters"]
    assert ["front" in line for line in rows] == [True, True, False, False]
    assert [str(size) in line.split() for line, size in zip(rows, (500, 100, 200, 100), strict=True)] == [True] * 4
    both = "val/accuracy (larger is better) and classifier/num_parameters (smaller is better)"
    assert f"Pareto front of {both}: 2 of 4 jobs\n" in text
    own = "val/accuracy 0.8, classifier/num_parameters 100: +decisions.kernel_0=k1 +decisions.norm=layer"
    assert f"  job 1: {own}\n" in text


@pytest.mark.parametrize("modes", [("max", "min"), ("min", "min")])
def test_a_front_is_what_nothing_dominates(tmp_path: Path, modes: tuple[str, str]) -> None:
    folder = search(tmp_path / "a", 40, second_objective="test/f1", second_mode=modes[1])
    values = np.round(np.random.default_rng(0).random((40, 2)), 1)
    for number, (one, two) in enumerate(values.tolist()):
        write_job(folder / str(number), f"x={number}", value=one, metrics={"test/f1": two}, **KEY)
    signs = np.array([1 if mode == "max" else -1 for mode in modes])
    kept = {
        number
        for number, own in enumerate(values * signs)
        if not any((other >= own).all() and (other > own).any() for other in values * signs)
    }
    assert {int(setting.jobs) for setting in front(points(compare(folder)), *modes)} == kept


def test_settings_with_seeds(tmp_path: Path) -> None:
    folder = search(tmp_path / "seeds", 6, repeats=2, **TWO)
    for number, (value, size) in enumerate([(0.7, 600), (0.5, 600), (0.9, 500), (0.7, 500), (0.99, 500)]):
        words = (f"+decisions.kernel_0=k{number // 2}", f"seed={number % 2}")
        job(folder, number, value, *words, num_parameters=size)
    comparison = compare(folder)
    assert [setting.num_planned for setting in comparison.settings] == [2, 2, 2]
    assert best_so_far(comparison).tolist() == pytest.approx([0.6, 0.8, 0.8])
    text = printed(folder)
    assert ": 1 of 2 settings\n  jobs 2, 3: val/accuracy 0.8, classifier/num_parameters 500: +decisions.kernel" in text
    settings = table(folder / "settings.csv")
    assert [(row["second_mean"], row["on_front"]) for row in settings[:2]] == [("500.0", "true"), ("600.0", "false")]


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_search_with_one_model_has_its_decisions(tmp_path: Path, num_seeds: int) -> None:
    folder = search(tmp_path / "one", num_seeds, repeats=num_seeds)
    for seed in range(num_seeds):
        words = [f"seed={seed}"] if num_seeds > 1 else []
        job(folder, seed, 0.5, "+decisions.kernel_0=k5", *words)
    [line] = [line for line in printed(folder).splitlines() if "larger is better" in line]
    assert line.endswith("larger is better): +decisions.kernel_0=k5")
    assert "+decisions.kernel_0=k5" in read(folder).text


def test_draws_that_were_made_before_are_counted(tmp_path: Path) -> None:
    ending = "the search ends with 2 of 9 jobs: the last 100 draws were all of known points"
    folder = search(tmp_path / "same", 2, num_same=107, ending=ending)
    for number in range(2):
        job(folder, number, 0.5 + number, f"+decisions.kernel_0=k{number}")
    notes = (f"T{ending[1:]}.", "Draws of settings that a job has already, whose result is reused: 107.")
    text, page = printed(folder), read(folder).text
    assert all(note in text and note in page for note in notes)


def test_reasons_of_draws_that_make_no_model_are_counted(tmp_path: Path) -> None:
    folder = search(tmp_path / "mixed", 5)
    refused(folder, 0, "+decisions.kernel_0=k3", error="found no input.")
    for number in (1, 2, 3):
        error = f"node {number} does not take (b, {7 * number})."
        refused(folder, number, f"+decisions.x={number}", "+decisions.y=k7", error=error)
    with pytest.raises(RunError, match="found no model in 4 draws") as caught:
        exit_code(folder)
    assert "job 1 (+decisions.x=1 +decisions.y=k7) (each has decisions.y=k7): node 1" in str(caught.value)
    job(folder, 4, 0.5, "+decisions.kernel_0=k5")
    text = printed(folder)
    assert "draws that make no working model (infeasible, not trained): 4" in text
    assert "  3, such as job 1 (each has decisions.y=k7): node 1 does not take (b, 7)." in text
    assert "  1, such as job 0: found no input." in text
    assert exit_code(folder) == 0


def test_a_random_search_beside_a_search_is_its_baseline(sweep: Path) -> None:
    identity = {"fixed": ["+recipe=mwn"], "dimensions": [{"key": "x"}], "repeats": 1}
    for name, sampler, words in (("a", "random", []), ("b", "tpe", ["sweep.seed=3"]), ("other", "random", ["seed=1"])):
        folder = sweep.with_name(name)
        if not folder.exists():
            for number in range(2):
                job(search(folder, 2) if not number else folder, number, 0.6 + 0.1 * number, f"x={number}")
        fixed = {"fixed": [*identity["fixed"], *words], "sampler": sampler}  # type: ignore[misc]
        (folder / "sweep.json").write_text(json.dumps({"identity": {**identity, **fixed}}))
    baseline = random_baseline(compare(sweep))
    assert baseline is not None and (baseline.name, baseline.best.tolist()) == ("a", [0.6, 0.7])
    assert "The random search is the one of a." in read(sweep).text
    assert random_baseline(compare(sweep.with_name("a"))) is None
    (sweep.with_name("a") / "1" / "summary.json").unlink()
    assert random_baseline(compare(sweep)) is None, "it has not ended"


LONG = "problems.classifier_of_a_long_name.optimizer"


def table_of(text: str) -> list[str]:
    return text.strip().partition("\n\n")[0].splitlines()


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    for job in range(12):
        words = [f"{LONG}.parameter_{key}={0.123456789 * (job // 3 + 1)}" for key in range(4)]
        words += [f"hypergradient=conjugate_gradient_{job // 3}", f"seed={job % 3}"]
        write_job(tmp_path / str(job), *words, value=0.25 * (job // 3) + 0.01 * (job % 3))
    return tmp_path


@pytest.mark.parametrize("width", [50, 200])
def test_the_tables_fit_the_terminal(wide: Path, width: int) -> None:
    text = printed(wide, width)
    lines = table_of(text)
    assert len(lines) == 13 + (text.count("No room for") > 0)
    assert all(len(line) <= width for line in lines[:13])
    assert all(line.split()[0] == str(job) for job, line in enumerate(lines[1:13]))
    assert sum("finished, best" in line for line in lines) == 3 and lines[0].split()[0] == "job"
    assert "val/loss" in lines[0]


def test_a_wide_terminal_has_all_columns_and_names_the_best_setting_with_its_seeds(wide: Path) -> None:
    text = printed(wide, 300)
    head, first, *_ = table_of(text)
    hyperparameters = [f"optimizer.parameter_{key}" for key in range(4)]
    assert head.split() == ["job", *hyperparameters, "hypergradient", "seed", "val/loss", "status", "time"]
    assert first.split() == ["0", *["0.1235"] * 4, "conjugate_gradient_0", "0", "0", "finished,", "best", "1.5", "s"]
    best = "best: jobs 0, 1, 2, val/loss 0.01 ± 0.0058 (mean ± standard error of 3 seeds; smaller is better)"
    found, _, repeated = text.partition("best:")[2].partition("once more: ")
    assert best in text and "seed=" not in found and repeated.splitlines()[0].endswith(" seed=0,1,2")
    [line] = [line for line in text.splitlines() if "★" in line]
    assert "0.0058  3 of 3  ★" in line and line.rstrip().endswith("0, 1, 2")
    assert (wide / "settings.csv").is_file()


def test_of_a_large_sweep_the_best_jobs_are_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.cli.verbs.report.MAX_ROWS", 20)
    for job in range(25):
        write_job(tmp_path / str(job), f"lr={job}", value=abs(job - 15.0))
    text = printed(tmp_path, 80)
    assert [line.split()[0] for line in table_of(text)[1:]] == [*map(str, range(5, 25)), "5"]
    assert "5 more jobs are in sweep.csv; these are the best." in text
    assert "best: job 15, val/loss 0 (smaller is better): lr=15" in text
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 26
