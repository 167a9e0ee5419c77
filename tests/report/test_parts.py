import numpy as np
import pytest

from mlotool.report.figure import THEME, css_variables, problem_colours, themed, visible_range
from mlotool.report.formats import duration, number
from mlotool.report.run_figures import smoothed


def test_each_light_colour_is_found_again_in_an_svg() -> None:
    assert len({light for light, _ in THEME.values()}) == len(THEME)
    assert themed(f'stroke="{THEME["problem-0"][0].upper()}"') == 'stroke="var(--problem-0)"'
    assert css_variables().count("--problem-0:") == 2
    assert len(set(problem_colours([f"p{index}" for index in range(10)]).values())) == 8


def test_numbers_and_times() -> None:
    assert [number(value) for value in (0.5, 3.0, float("nan"), "text", True)] == ["0.5", "3", "nan", "text", "True"]
    times = ["0.0 s", "1 min 00 s", "1 min 01 s", "3 h 12 min"]
    assert [duration(value) for value in (0.04, 59.99, 61, 11_520)] == times
    assert duration("x") == duration(None) == duration(float("nan")) == number(None)


def test_smoothing_keeps_a_constant_and_skips_gaps() -> None:
    values = np.full(300, 2.5)
    values[100:140] = np.nan
    smooth = smoothed(values)
    assert smooth is not None
    np.testing.assert_allclose(smooth[~np.isnan(smooth)], 2.5)
    assert np.isnan(smooth[120])
    assert smoothed(values[:20]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, 0.91, 0.93, 1e6], (0.9, 0.93, False, True)),
        ([-0.9, -0.91, -0.93, -50.0], (-0.93, -0.9, False, True)),
        ([1.0, 10.0, 100.0, 1e6], (1.0, 1e6, True, False)),
        ([0.1, 0.5, 0.7, 0.9], (0.1, 0.9, False, False)),
        ([0.3, 1e6], (0.3, 1e6, True, False)),
        ([2.0], (2.0, 2.0, False, False)),
        ([1e-320, 1e-6, 1e-5, 1e149], (1e-320, 1e-5, False, True)),
        # Of three, none is the exception.
        ([0.975, 0.952, 0.177], (0.177, 0.975, False, False)),
        # At most a quarter is left out.
        ([0.1] * 35 + [0.2] * 35 + [1e9] * 30, (0.1, 1e9, True, False)),
    ],
)
def test_what_is_shown_of_an_axis(values: list[float], expected: tuple[float, float, bool, bool]) -> None:
    seen = visible_range(values)
    assert (seen.low, seen.high, seen.is_log, seen.is_clipped) == expected
    assert ("Outliers are clipped" in seen.note) is seen.is_clipped
    assert seen.clip([1e300]).tolist() == [seen.high]
