"""The page of a sweep whose jobs began with inherited weights."""

import math
from pathlib import Path

import numpy as np
import pytest

from mlotool.report.rank_correlation import rank_correlation
from mlotool.report.sweep import compare
from mlotool.report.sweep_figures import inherited_pairs
from mlotool.report.sweep_page import write_sweep_page
from tests.report.sweep_folders import write_job, write_plan


def _sweep(folder: Path, pairs: list[tuple[float | None, float]]) -> Path:
    write_plan(folder, len(pairs))
    for number, (before, after) in enumerate(pairs):
        metrics = {} if before is None else {"inherited/val/loss": before}
        write_job(folder / str(number), f"decisions.kernel_0=k{number}", value=after, metrics=metrics)
    return folder


def test_the_page_shows_inherited_beside_trained(tmp_path: Path) -> None:
    folder = _sweep(tmp_path / "sweep", [(0.3, 0.1), (0.5, 0.3), (0.4, 0.2), (0.6, 0.4), (None, 9.0)])
    assert inherited_pairs(compare(folder)) == [(0.3, 0.1), (0.5, 0.3), (0.4, 0.2), (0.6, 0.4)]
    page = write_sweep_page(folder).read_text()
    assert "Rank correlation (Spearman) of 4 jobs: 1.00" in page
    assert (folder / "report" / "inherited.svg").is_file()


def test_two_jobs_are_no_correlation(tmp_path: Path) -> None:
    page = write_sweep_page(_sweep(tmp_path / "sweep", [(0.3, 0.1), (0.5, 0.3)])).read_text()
    assert "Rank correlation" not in page


def test_equal_values_have_none(tmp_path: Path) -> None:
    page = write_sweep_page(_sweep(tmp_path / "sweep", [(0.3, 0.1), (0.3, 0.3), (0.3, 0.2)])).read_text()
    assert "The 3 jobs have no rank correlation: one of the two is the same for all." in page


def test_the_correlation_is_that_of_ranks_with_ties() -> None:
    pairs = [(1.0, 3.0), (2.0, 1.0), (2.0, 4.0), (5.0, 9.0), (90.0, 5.0)]
    expected = np.corrcoef([1, 2.5, 2.5, 4, 5], [2, 1, 3, 5, 4])[0, 1]
    found = rank_correlation(pairs)
    assert found.value == pytest.approx(expected)
    assert found.low < found.value < found.high
    assert found == rank_correlation(pairs)


def test_the_interval_holds_the_correlation_as_often_as_it_says() -> None:
    generator, inside = np.random.default_rng(0), 0
    # Spearman's of a normal distribution: 6 / pi asin(rho / 2).
    expected = 6 / math.pi * math.asin(0.6 / 2)
    for _ in range(60):
        first, second = generator.normal(size=(2, 40))
        found = rank_correlation(list(zip(first, 0.6 * first + 0.8 * second, strict=True)))
        inside += found.low <= expected <= found.high
    assert 50 <= inside <= 60


def test_nothing_has_no_correlation() -> None:
    assert math.isnan(rank_correlation([]).value)
