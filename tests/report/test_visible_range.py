import numpy as np
import pytest

from mlotool.report.figure import visible_range


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, 0.91, 0.93, 1e6], (0.9, 0.93, False, True)),
        ([-0.9, -0.91, -0.93, -50.0], (-0.93, -0.9, False, True)),
        ([0.5, 0.6, 0.7, 1e6], (0.5, 0.7, False, True)),
        ([1.0, 10.0, 100.0, 1e6], (1.0, 1e6, True, False)),
        ([0.1, 0.5, 0.7, 0.9], (0.1, 0.9, False, False)),
        ([0.3, 1e6], (0.3, 1e6, True, False)),
        ([1.0, 1.0, 1.0, 9.0], (1.0, 9.0, False, False)),
        ([2.0], (2.0, 2.0, False, False)),
        ([1e-320, 1e-6, 1e-5, 1e149], (1e-320, 1e-5, False, True)),
        # Of three, none is the exception.
        ([0.975, 0.952, 0.177], (0.177, 0.975, False, False)),
    ],
)
def test_what_is_shown(values: list[float], expected: tuple[float, float, bool, bool]) -> None:
    found = visible_range(values)
    assert (found.low, found.high, found.is_log, found.is_clipped) == expected


def test_at_most_a_quarter_is_left_out() -> None:
    found = visible_range([*np.linspace(0.0, 1.0, 70), *np.full(30, 1e9)])
    assert not found.is_clipped


def test_what_lies_outside_is_told() -> None:
    found = visible_range([0.9, 0.91, 0.93, 1e6])
    assert "would crush the others" in found.note
    assert found.clip([1e6, 0.9]).tolist() == [0.93, 0.9]
    assert visible_range([0.9, 0.91]).note == ""
