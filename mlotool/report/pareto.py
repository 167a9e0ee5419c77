"""Two objectives of a search: the settings of which no other one is better in both."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlotool.report.figure import Card, Sketchbook, legend_above, use_log_scale
from mlotool.report.formats import shortened
from mlotool.report.palette import light
from mlotool.report.series import LARGEST
from mlotool.report.sweep_settings import Comparison, Setting
from mlotool.report.visible_range import visible_range


@dataclass(frozen=True)
class Point:
    """A setting with a value of both objectives, each the mean of its jobs."""

    setting: Setting
    first: float
    second: float


def points(comparison: Comparison) -> list[Point]:
    """Return the settings that have both; none where there is one objective."""
    key = comparison.plan.second_objective
    if not key or not comparison.mode:
        return []
    found = []
    for each in comparison.settings:
        values = [row.number(key) for row in each.rows if row.status == "finished"]
        known = [value for value in values if value is not None and abs(value) < LARGEST]
        if each.mean is not None and each.is_complete and len(known) >= len(each.values):
            found.append(Point(each, each.mean, float(np.mean(known))))
    return found


def front(found: list[Point], mode: str, second_mode: str) -> list[Point]:
    """Return the points of which none is better in one objective and as good in the other, by the first one.

    Example:
        >>> setting = Setting({}, (), (), 1)
        >>> some = [Point(setting, *each) for each in ((0.9, 5.0), (0.8, 1.0), (0.8, 2.0), (0.7, 1.0))]
        >>> [(each.first, each.second) for each in front(some, "max", "min")]
        [(0.9, 5.0), (0.8, 1.0)]
    """
    one, two = (1 if each == "min" else -1 for each in (mode, second_mode))
    kept: list[Point] = []
    for each in sorted(found, key=lambda point: (one * point.first, two * point.second)):
        is_equal = bool(kept) and (each.first, each.second) == (kept[-1].first, kept[-1].second)
        if not kept or two * each.second < two * kept[-1].second or is_equal:
            kept.append(each)
    return kept


def pareto_front(comparison: Comparison) -> list[Point]:
    """Return the front of a sweep's settings."""
    return front(points(comparison), comparison.mode, comparison.plan.second_mode)


def front_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the settings by their two objectives, and their front; nothing below two settings."""
    found = points(comparison)
    if len(found) < 2:
        return []
    plan = comparison.plan
    best = front(found, comparison.mode, plan.second_mode)
    figure, axes = book.new()
    seen, across = (visible_range([getattr(each, which) for each in found]) for which in ("first", "second"))
    on_front = set(map(id, best))
    rest = [each for each in found if id(each) not in on_front]
    handles, labels = [], []
    if rest:
        [line] = axes.plot(
            across.clip([each.second for each in rest]), seen.clip([each.first for each in rest]), "o",
            color=light("problem-0"), alpha=0.5, markersize=4,
        )  # fmt: skip
        handles.append(line)
        labels.append("others")
    x, y = across.clip([each.second for each in best]), seen.clip([each.first for each in best])
    order = np.argsort(x, kind="stable")
    # Between two of its points the front has nothing better than the corner.
    where: Literal["post", "pre"] = "post" if plan.second_mode == "min" else "pre"
    axes.step(x[order], y[order], where=where, color=light("problem-1"), linewidth=1.4)
    [line] = axes.plot(x, y, "o", color=light("problem-1"), markersize=5.5, zorder=3)
    seen.apply(axes)
    if across.is_log:
        use_log_scale(axes, "x")
    axes.margins(x=0.06)
    axes.set_xlabel(shortened(f"{plan.second_objective} ({_better(plan.second_mode)})", 60))
    axes.set_ylabel(shortened(comparison.objective, 40))
    axes.tick_params(axis="x", labelsize=7.5)
    legend_above(axes, [line, *handles], ["Pareto front", *labels])
    num = len(best)
    note = (
        f"{num} of {len(found)} settings {'are' if num > 1 else 'is'} on the front: none is better in both objectives."
    )
    clipped = " Values that crush the others are drawn at the edge." if seen.is_clipped or across.is_clipped else ""
    return [book.finish(figure, "pareto", "Two objectives", note + clipped)]


def _better(mode: str) -> str:
    return "smaller is better" if mode == "min" else "larger is better"
