import doctest
import importlib
import re

import numpy as np
import pytest

from mlotool.report.formats import duration, number
from mlotool.report.markup import Markup, element
from mlotool.report.palette import THEME, css_variables, problem_colours, themed
from mlotool.report.series import MAX_BUCKETS, needs_log_scale, smoothed, thinned


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = np.array([int(part, 16) for part in re.findall("..", colour[1:])]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ np.array([0.2126, 0.7152, 0.0722]))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", [name for name in THEME if name not in ("page", "card", "line")])
def test_colours_stand_out_from_the_page(name: str, mode: int) -> None:
    needed = 4.5 if name in ("ink", "muted", "finished", "failed", "interrupted") else 3.0
    assert contrast(THEME[name][mode], THEME["card"][mode]) >= needed


def test_each_light_colour_is_found_again_in_an_svg() -> None:
    assert len({light for light, _ in THEME.values()}) == len(THEME)
    assert (
        themed(f'<path style="stroke: {THEME["problem-0"][0].upper()}"/>') == '<path style="stroke: var(--problem-0)"/>'
    )
    assert css_variables().count("--problem-0:") == 2
    assert len(set(problem_colours([f"p{index}" for index in range(10)]).values())) == 8


def test_markup_escapes_all_that_is_not_markup() -> None:
    made = element("a", "<b>", Markup("<i></i>"), title='"x"', class_="y", hidden=None)
    assert made == '<a title="&quot;x&quot;" class="y">&lt;b&gt;<i></i></a>'


def test_numbers_and_times() -> None:
    assert [number(value) for value in (0.5, 3.0, float("nan"), "text", True)] == ["0.5", "3", "nan", "text", "True"]
    assert [duration(value) for value in (0.04, 59.99, 61, 11_520)] == [
        "0.0 s",
        "1 min 00 s",
        "1 min 01 s",
        "3 h 12 min",
    ]
    assert duration("x") == duration(None) == duration(float("nan")) == number(None)


def test_smoothing_keeps_a_constant_and_skips_gaps() -> None:
    values = np.full(300, 2.5)
    values[100:140] = np.nan
    smooth = smoothed(values)
    assert smooth is not None
    np.testing.assert_allclose(smooth[~np.isnan(smooth)], 2.5)
    assert np.isnan(smooth[120])
    assert smoothed(values[:20]) is None


def test_thinning_keeps_spikes_and_order() -> None:
    values = np.zeros(50_000)
    values[12_345], values[40_000] = 9.0, -9.0
    ticks, thin = thinned(np.arange(50_000.0), values)
    assert len(ticks) <= 2 * MAX_BUCKETS
    assert (thin.max(), thin.min()) == (9.0, -9.0)
    assert (np.diff(ticks) > 0).all()


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 1000], True), ([1, 50], False), ([0, 1000], False), ([-1, 1], False), ([], False)]
)
def test_log_scale(values: list[float], expected: bool) -> None:
    assert needs_log_scale(np.array(values, dtype=float)) is expected


@pytest.mark.parametrize("name", ["formats", "markup"])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"mlotool.report.{name}")).failed == 0
