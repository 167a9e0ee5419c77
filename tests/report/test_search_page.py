"""The page, the tables and the files of a search over model spaces."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlotool.cli.sweep import exit_code
from mlotool.core.errors import RunError
from mlotool.report import write_report, write_sweep_page
from mlotool.report.search import best_so_far, front, points, random_baseline, trials
from mlotool.report.sweep import compare
from tests.report.html_check import Page, read_page
from tests.report.model_nodes import residual, write_nodes
from tests.report.sweep_folders import write_job

SCRIPT = files("mlotool.report").joinpath("sort_table.js").read_text(encoding="utf-8")
KEY = {"key": "val/accuracy", "mode": "max"}
REASON = "mutator 'kernel': node 'add' does not take what it is given: <b>x</b>"


def search(folder: Path, num_jobs: int, sampler: str = "tpe", fixed: tuple[str, ...] = (), **settings: Any) -> Path:
    """Write what a search was asked for."""
    folder.mkdir(parents=True)
    words = ["+recipe=explore", f"sweep.sampler={sampler}", *fixed]
    identity = {"fixed": words, "dimensions": [], "method": "optuna", "sampler": sampler, "seed": 0}
    (folder / "sweep.json").write_text(json.dumps({"name": "explore", "identity": identity}))
    asked = {
        "sampler": sampler,
        "num_random": 0,
        "repeats": 1,
        "second_objective": None,
        "second_mode": None,
        **settings,
    }
    plan = {"objective": "val/accuracy", "mode": "max", "num_jobs": num_jobs, "keys": {}, "search": asked}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def job(folder: Path, number: int, value: float, *words: str, num_parameters: int = 100) -> Path:
    path = write_job(folder / str(number), *words, value=value, **KEY)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "num_parameters": {"classifier": num_parameters}}))
    return path


def refused(folder: Path, number: int, *words: str) -> None:
    path = write_job(folder / str(number), *words, status="infeasible", error=REASON, **KEY)
    (path / "report.html").unlink()


def read(folder: Path) -> Page:
    return read_page(write_sweep_page(folder), SCRIPT)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = search(tmp_path / "explore" / "multirun" / "b", 5)
    for number, kernel in enumerate(("k3", "k5", "k1")):
        job(folder, number, 0.7 + 0.1 * number, f"+decisions.kernel_0={kernel}", "+decisions.kernel_1=k3")
    refused(folder, 3, "+decisions.kernel_0=k7")
    refused(folder, 4, "+decisions.kernel_0=k9")
    return folder


def test_importances_say_what_a_decision_counts_as_where_it_was_not_asked_for(tmp_path: Path) -> None:
    folders = {name: search(tmp_path / "explore" / "multirun" / name, 9) for name in ("all", "some")}
    for number in range(9):
        words = [f"+decisions.width={number}", f"+decisions.kernel=k{number % 2}"]
        job(folders["all"], number, 0.1 * number, *words)
        job(folders["some"], number, 0.1 * number, *(words if number % 3 else words[:1]))
    said = "where a decision was not asked for, that counts as a value of it"
    assert "Importance of the hyperparameters" in read(folders["all"]).text
    assert said not in read(folders["all"]).text
    assert said in read(folders["some"]).text


def test_draws_that_make_no_model_are_no_failures(sweep: Path) -> None:
    page = read(sweep)
    assert "5 of 5 3 finished, 2 infeasible" in page.text
    assert "failed" not in page.text
    assert "Why jobs failed" not in page.text
    assert "2 draws make no model, and were not trained" in page.text
    assert REASON in page.text
    assert re.search(r'<span class="state"><span aria-hidden="true">∅</span> infeasible</span>', page.source)
    assert exit_code(sweep) == 0
    write_job(sweep / "5", status="failed", error="nan", **KEY)
    with pytest.raises(RunError, match="1 of 6 jobs of the sweep failed: 5"):
        exit_code(sweep)
    assert "1 of 6 failed" in read(sweep).text


def test_the_page_of_such_a_job(sweep: Path) -> None:
    page = read_page(write_report(sweep / "3"))
    assert "infeasible: its decisions make no model" in page.text
    assert "Why it makes no model" in page.text


def test_decisions_that_only_some_jobs_have(tmp_path: Path) -> None:
    folder = search(tmp_path / "a", 12)
    for number in range(12):
        depth = 1 + number // 3
        words = [f"+decisions.depth={depth}", f"+decisions.kernel_0=k{number % 3}"]
        # The second kernel is there where the depth is, and the same then.
        words += ["+decisions.kernel_1=k5"] if depth > 2 else []
        job(folder, number, 0.5 + 0.1 * (number % 3) + 0.01 * depth, *words)
    found = compare(folder)
    assert [column.label for column in found.columns] == ["depth", "kernel_0", "kernel_1"]
    assert "decisions.kernel_1" not in found.constants
    page = read(folder)
    importance = page.source.partition("Importance of the hyperparameters")[2].partition("</figure>")[0]
    assert {"kernel_0", "kernel_1", "depth"} <= set(re.findall(r">([\w.]+)</text>", importance))
    assert "+decisions.depth=4 +decisions.kernel_0=k2 +decisions.kernel_1=k5" in page.text


def test_the_best_model_is_shown(sweep: Path) -> None:
    write_nodes(sweep / "2", residual(3, [1]), {"kernel_0": "k5"})
    write_nodes(sweep / "0", residual(3, [0, 1]))
    page = read(sweep)
    assert "Best model" in page.text
    assert "15 nodes, 1 of them changed" in page.text
    assert page.source.count('class="node changed"') == 1


def test_two_objectives_have_a_front(tmp_path: Path) -> None:
    folder = search(tmp_path / "a", 4, second_objective="classifier/num_parameters", second_mode="min")
    for number, (value, count) in enumerate(((0.9, 500), (0.8, 100), (0.7, 300), (0.6, 50))):
        job(folder, number, value, f"+decisions.width={number}", num_parameters=count)
    refused(folder, 4, "+decisions.width=9")
    found = compare(folder)
    best = front(points(found), "max", "min")
    assert [(each.setting.jobs, each.second) for each in best] == [("0", 500), ("1", 100), ("3", 50)]
    page = read(folder)
    assert "3 of 4 settings are on the front: none is better in both objectives." in page.text
    table = page.source.partition("<h2>Pareto front</h2>")[2].partition("</table>")[0]
    assert re.findall(r'<td data-sort="(\d)">', table) == ["0", "1", "3"]
    assert (folder / "report" / "pareto.svg").is_file()


@pytest.mark.parametrize("modes", [("max", "min"), ("min", "min")])
def test_a_front_is_what_nothing_dominates(tmp_path: Path, modes: tuple[str, str]) -> None:
    second = {"second_objective": "test/f1", "second_mode": modes[1]}
    folder = search(tmp_path / "a", 40, **second)
    rng = np.random.default_rng(0)
    values = np.round(rng.random((40, 2)), 1)
    for number, (one, two) in enumerate(values.tolist()):
        write_job(
            folder / str(number), f"x={number}", value=one, key="val/accuracy", mode="max", metrics={"test/f1": two}
        )
    signs = np.array([1 if mode == "max" else -1 for mode in modes])
    kept = {
        number
        for number, own in enumerate(values * signs)
        if not any((other >= own).all() and (other > own).any() for other in values * signs)
    }
    assert {int(each.setting.jobs) for each in front(points(compare(folder)), *modes)} == kept


def test_a_random_search_beside_it_is_drawn(tmp_path: Path) -> None:
    beside = tmp_path / "explore" / "multirun"
    own = search(beside / "c", 4, "evolution", num_random=2)
    for number in range(4):
        job(own, number, 0.5 + 0.1 * number, f"+decisions.width={number}")
    assert random_baseline(compare(own)) is None
    for name, fixed, ends in (("a", (), 3), ("b", (), 2), ("d", ("data=mnist",), 3)):
        other = search(beside / name, 3, "random", fixed)
        for number in range(ends):
            job(other, number, (0.6, 0.4, 0.7)[number], f"+decisions.width={number}")
    found = random_baseline(compare(own))
    # Of the others one has not ended, and one has other data.
    assert found is not None
    assert (found.name, found.best.tolist()) == ("a", [0.6, 0.6, 0.7])
    page = read(own)
    assert "The random search is that of a." in page.text
    assert "random start" in page.source
    # A random search needs none.
    assert random_baseline(compare(beside / "a")) is None


def test_a_baseline_behind_a_link_is_none(tmp_path: Path) -> None:
    own = search(tmp_path / "multirun" / "b", 1)
    job(own, 0, 0.5, "x=1")
    other = search(tmp_path / "elsewhere", 1, "random")
    job(other, 0, 0.5, "x=1")
    (own.parent / "a").symlink_to(other)
    assert random_baseline(compare(own)) is None


def test_trials_are_means_of_their_repetitions(tmp_path: Path) -> None:
    folder = search(tmp_path / "a", 9, repeats=3)
    for number in range(7):
        job(folder, number, 0.1 * number, f"+decisions.width={number // 3}", f"seed={number % 3}")
    found = compare(folder)
    assert [(each.name, each.status) for each in trials(found)] == [
        ("0", "finished"), ("3", "finished"), ("6", "unfinished"),
    ]  # fmt: skip
    assert best_so_far(trials(found), "max").tolist() == pytest.approx([0.1, 0.4, 0.4])
    assert [each.num_planned for each in found.settings] == [3, 3, 3]
    assert "Objective over the trials, each the mean of its jobs" in read(folder).text


def test_strange_plans_do_not_stop_the_page(sweep: Path) -> None:
    plan = json.loads((sweep / "plan.json").read_text())
    (sweep / "0" / "summary.json").write_text('{"status": "finished", "num_parameters": {"a": "x", "b": -1, "d": [1]}}')
    for asked in ({"repeats": "many", "second_mode": "up"}, {"repeats": 10**14, "num_random": 10**14}):
        (sweep / "plan.json").write_text(json.dumps({**plan, "search": asked}))
        assert "explore: sweep" in read(sweep).text
