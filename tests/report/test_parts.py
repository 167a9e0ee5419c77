import doctest
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from mlotool.report.figure import (
    THEME,
    Sketchbook,
    css_variables,
    needs_log_scale,
    problem_colours,
    report_style,
    themed,
)
from mlotool.report.formats import duration, number
from mlotool.report.run_figures import smoothed


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


def test_a_long_curve_is_a_short_path_with_its_spikes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[12_345], values[40_000] = 90.0, -90.0
    with report_style():
        book = Sketchbook(tmp_path / "report")
        plot = book.new()
        plot.axes.plot(values)
        svg = plot.card("curve", "Curve").svg
    assert len(svg) < 150_000
    path = max(re.findall(r'd="([^"]*)"', svg), key=len)
    heights = np.array([float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)])
    low, high = np.quantile(heights, [0.01, 0.99])
    assert heights.min() < low - 2 * (high - low) < high + 2 * (high - low) < heights.max()


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 1000], True), ([1, 50], False), ([0, 1000], False), ([-1, 1], False), ([], False)]
)
def test_log_scale(values: list[float], expected: bool) -> None:
    assert needs_log_scale(np.array(values, dtype=float)) is expected


@pytest.mark.parametrize(
    "name", ["figure", "formats", "models", "rank_correlation", "search", "sweep", "sweep_figures", "sweep_fusion"]
)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"mlotool.report.{name}")).failed == 0
