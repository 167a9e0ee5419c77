from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlotool.report import rank_correlation as importance
from mlotool.report.sweep import Column

LR = Column("lr", "lr", tuple(str(value) for value in range(12)), False)
WIDTH = Column("width", "width", tuple(str(value % 3) for value in range(12)), False)


def test_what_decides_is_worth_most() -> None:
    pytest.importorskip("optuna")
    method, found = importance.importances([WIDTH, LR], [float(value) for value in range(12)])
    assert method == importance.FANOVA
    assert [label for label, _ in found] == ["lr", "width"]


def _assert(*_: Any) -> Sequence[float]:
    raise AssertionError


def test_a_variance_that_rounding_makes_negative_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna asserts that there is none: on 1,000 jobs of 500 hyperparameters there was."""
    monkeypatch.setattr(importance, "_fanova", _assert)
    method, found = importance.importances([WIDTH, LR], [float(value) for value in range(12)])
    assert method == importance.CORRELATION
    assert found[0] == ("lr", pytest.approx(1.0))


def test_of_very_many_the_correlations_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "_fanova", lambda *_: pytest.fail("takes minutes"))
    many = [Column(f"k{key}", f"k{key}", LR.texts * 5, False) for key in range(41)]
    assert importance.importances(many, [float(value) for value in range(60)])[0] == importance.CORRELATION


def test_the_correlation_ratio_of_names() -> None:
    """Ranks 0..11 in groups of equal names; their variance between the groups, over all of it."""
    names = Column("solver", "solver", ("cg",) * 4 + (None,) * 4 + ("exact",) * 4, False)
    _, [(_, found)] = importance.importances([names], [float(value) for value in range(12)])
    ranks = [4 * [1.5], 4 * [5.5], 4 * [9.5]]
    between = sum((each - 5.5) ** 2 for group in ranks for each in group)
    expected = between / sum((each - 5.5) ** 2 for each in range(12))
    assert importance._correlation(names, np.arange(12.0)) == pytest.approx(expected**0.5)
    assert 0.0 <= found <= 1.0
