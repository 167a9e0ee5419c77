from collections.abc import Sequence
from typing import Any

import pytest

from mlotool.report import importance
from mlotool.report.sweep_columns import Column

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
