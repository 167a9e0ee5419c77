"""The residuals of layer-parallel solves: how they fall from cycle to cycle, early and late in the training."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlotool.report.figure import Card, Sketchbook, legend_above, use_log_scale
from mlotool.report.formats import number, words
from mlotool.report.palette import light
from mlotool.report.series import Series

_CYCLE = re.compile(r"(?P<solve>.+)_residual_(?P<cycle>\d+)")


def split_residuals(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """Return the residuals after each cycle (`forward_residual_0`, ...), and all other series."""
    residuals = [each for each in series if _CYCLE.fullmatch(each.metric)]
    return residuals, [each for each in series if each not in residuals]


def residual_cards(book: Sketchbook, residuals: Sequence[Series], colours: dict[str, str]) -> list[Card]:
    """Draw each solve's residual against the cycle, at the first and the last logged tick.

    Args:
        book: makes the figures.
        residuals: one series a cycle.
        colours: of the problems.
    """
    cards = []
    for owner in dict.fromkeys(each.owner for each in residuals if each.owner in colours):
        own: dict[str, dict[int, Series]] = {}
        for each in residuals:
            found = _CYCLE.fullmatch(each.metric)
            if each.owner == owner and found is not None:
                own.setdefault(found["solve"], {})[int(found["cycle"])] = each
        cards += [_card(book, owner, solve, cycles, colours[owner]) for solve, cycles in own.items()]
    return cards


def _card(book: Sketchbook, owner: str, solve: str, cycles: dict[int, Series], colour: str) -> Card:
    figure, axes = book.new()
    ticks = cycles[min(cycles)].ticks
    handles, labels, drawn = [], [], []
    for tick, style, width in ((ticks[0], "--", 1.0), (ticks[-1], "-", 1.6)):
        numbers, values = _history(cycles, tick)
        if len(values) and f"tick {number(tick)}" not in labels:
            handles += axes.plot(numbers, values, style, color=light(colour), linewidth=width, marker="o", markersize=3)
            labels.append(f"tick {number(tick)}")
            drawn += [values]
    if drawn:
        use_log_scale(axes, "y")
        legend_above(axes, handles, labels)
    axes.set_xlabel("cycle")
    axes.set_xticks(sorted(cycles))
    return book.finish(figure, f"residuals-{owner}-{solve}", f"{owner}: residuals, {words(solve)}")


def _history(cycles: dict[int, Series], tick: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cycles of a tick and their residuals, without those that a log axis cannot show."""
    found = {cycle: each.values[each.ticks == tick] for cycle, each in sorted(cycles.items())}
    points = [(cycle, values[-1]) for cycle, values in found.items() if len(values) and values[-1] > 0]
    return np.array([cycle for cycle, _ in points], dtype=float), np.array([value for _, value in points], dtype=float)
