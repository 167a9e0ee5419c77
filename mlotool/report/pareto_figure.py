"""A picture of two objectives of a search, and their front."""

from typing import Literal

import numpy as np

from mlotool.report.figure import Card, Sketchbook, legend_above, use_log_scale
from mlotool.report.formats import shortened
from mlotool.report.palette import light
from mlotool.report.pareto import better, front, points
from mlotool.report.sweep_settings import Comparison
from mlotool.report.visible_range import visible_range


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
    axes.set_xlabel(shortened(f"{plan.second_objective} ({better(plan.second_mode)})", 60))
    axes.set_ylabel(shortened(comparison.objective, 40))
    axes.tick_params(axis="x", labelsize=7.5)
    legend_above(axes, [line, *handles], ["Pareto front", *labels])
    num = len(best)
    note = (
        f"{num} of {len(found)} settings {'are' if num > 1 else 'is'} on the front: none is better in both objectives."
    )
    clipped = " Values that crush the others are drawn at the edge." if seen.is_clipped or across.is_clipped else ""
    return [book.finish(figure, "pareto", "Two objectives", note + clipped)]
