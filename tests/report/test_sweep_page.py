import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mlotool.core.errors import ConfigError
from mlotool.report import sweep_rows, write_sweep_page
from mlotool.report.importance import CORRELATION, FANOVA, importances
from mlotool.report.sweep_columns import Column, differing_columns
from tests.report.html_check import read_page


def write_job(
    folder: Path, *overrides: str, status: str = "finished", value: float | None = None, error: str = ""
) -> None:
    folder.mkdir(parents=True)
    (folder / "overrides.txt").write_text("\n".join(overrides))
    objective = {"key": "val/loss", "value": value, "mode": "min"}
    (folder / "summary.json").write_text(json.dumps({"status": status, "objective": objective, "error": error or None}))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "mwn" / "multirun" / "2026-01-01_00-00-00"
    rates = (0.001, 0.01, 0.1, 0.5, 0.002, 0.05)
    for index, rate in enumerate(rates):
        solver = "cg" if index % 2 else "neumann"
        words = ("+recipe=mwn", f"problems.a.optimizer.lr={rate}", f"hypergradient={solver}")
        write_job(folder / str(index), *words, value=1 - rate)
    write_job(
        folder / "6", "+recipe=mwn", "problems.a.optimizer.lr=0.3", "hypergradient=cg", status="pruned", value=0.2
    )
    write_job(
        folder / "7",
        "+recipe=mwn",
        "problems.a.optimizer.lr=9",
        "hypergradient=cg",
        status="failed",
        error="<b>nan</b>",
    )
    return folder


def test_the_page_shows_every_job_and_loads_nothing(sweep: Path) -> None:
    page = read_page(write_sweep_page(sweep))
    assert "mwn: sweep" in page.text
    assert "best of 8 jobs, val/loss 0.5 smaller is better" in page.text
    assert "best job 3" in page.text
    assert "1 of 8 failed" in page.text
    assert "<b>nan</b>" in page.text
    assert "problems.a.optimizer.lr=0.5 hypergradient=cg" in page.text
    assert page.tags.count("figure") == 3
    assert page.source.count('<figure class="row">') == 1, "the wide figure alone takes a row"
    assert sorted(file.name for file in (sweep / "report").iterdir()) == [
        "importance.png", "objective.png", "parallel.png",
    ]  # fmt: skip


def test_columns_are_what_differs(sweep: Path) -> None:
    rate, solver = differing_columns(sweep_rows(sweep))
    assert (rate.key, rate.label, rate.is_log) == ("problems.a.optimizer.lr", "optimizer.lr", True)
    assert rate.numbers == (0.001, 0.01, 0.1, 0.5, 0.002, 0.05, 0.3, 9)
    assert (solver.label, solver.numbers) == ("hypergradient", None)


def test_labels_that_would_be_alike_are_longer(tmp_path: Path) -> None:
    for index in range(2):
        write_job(tmp_path / str(index), f"problems.a.optimizer.lr={index}", f"problems.b.optimizer.lr={index}")
    assert [each.label for each in differing_columns(sweep_rows(tmp_path))] == ["a.optimizer.lr", "b.optimizer.lr"]


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5], [0.1, 0.2, 0.3]])
def test_few_jobs_make_a_page_too(tmp_path: Path, values: list[float]) -> None:
    write_job(tmp_path / "9", "seed=9", status="failed", error="no")
    for index, value in enumerate(values):
        write_job(tmp_path / str(index), f"seed={index}", value=value)
    assert "Jobs" in read_page(write_sweep_page(tmp_path)).text


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a sweep"):
        write_sweep_page(tmp_path)


@pytest.mark.parametrize("has_optuna", [True, False])
def test_what_decides_the_objective_is_most_important(monkeypatch: pytest.MonkeyPatch, has_optuna: bool) -> None:
    if has_optuna:
        pytest.importorskip("optuna")
    else:
        monkeypatch.setitem(sys.modules, "optuna", None)
    generator = np.random.default_rng(0)
    decides, nothing = generator.uniform(size=40), generator.uniform(size=40)
    names = tuple(generator.choice(["x", "y"], size=40))
    objective = decides + 0.3 * np.array([name == "x" for name in names])
    columns = [
        Column(key, key, tuple(map(str, numbers)), tuple(numbers))
        for key, numbers in (("nothing", nothing), ("decides", decides))
    ]
    method, found = importances([*columns, Column("name", "name", names, None)], objective.tolist())
    assert method == (FANOVA if has_optuna else CORRELATION)
    assert [label for label, _ in found] == ["decides", "name", "nothing"]
    assert found[0][1] > 0.5 > found[2][1]
