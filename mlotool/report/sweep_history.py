"""The objective of a sweep's trials in their order: each one's value, and the best so far."""

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mlotool.report.figure import SIZE_INCHES, WIDE_INCHES, Card, Sketchbook, legend_above
from mlotool.report.formats import shortened
from mlotool.report.palette import light
from mlotool.report.search_history import Baseline, Trial, best_so_far, random_baseline, trials
from mlotool.report.series import LARGEST
from mlotool.report.sweep_settings import Comparison
from mlotool.report.visible_range import VisibleRange, visible_range

MANY = 30
"""A figure of more trials takes a row of the page, as does one of a search with more to be told."""

# The colour of a trial's mark by its status, where it did not finish.
COLOURS = {"running": "problem-2", "pruned": "muted", "failed": "failed"}


def history_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective over the trials of a search, or over the jobs of a sweep; nothing below two values.

    Where there is a finished random search of the same recipe beside the sweep, its best so far is a thin line.
    """
    every = trials(comparison)
    places = [place for place, each in enumerate(every) if each.value is not None and abs(each.value) < LARGEST]
    if len(places) < 2:
        return []
    found = [every[place] for place in places]
    baseline = random_baseline(comparison)
    is_wide = len(every) > MANY or baseline is not None or comparison.plan.num_random > 0
    figure, axes = book.new(WIDE_INCHES if is_wide else SIZE_INCHES)
    seen = visible_range([each.value or 0.0 for each in found])
    handles, labels = _draw_random(axes, comparison, every)
    more, names = _draw_values(axes, places, found, seen)
    handles, labels = [*handles, *more], [*labels, *names]
    best = best_so_far(every, comparison.mode)
    if comparison.mode and not np.isnan(best).all():
        [line] = axes.step(range(len(every)), seen.clip(best), where="post", color=light("problem-1"), zorder=3)
        handles, labels = [line, *handles], ["best so far", *labels]
    if baseline is not None:
        handles.insert(1, _draw_baseline(axes, baseline, len(every), seen))
        labels.insert(1, "random search")
    seen.apply(axes)
    is_search = comparison.plan.repeats > 1
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel("trial" if is_search else "job")
    axes.set_ylabel(shortened(comparison.objective, 40))
    legend_above(axes, handles, labels)
    notes = [seen.note([each.name for each in found], [each.value or 0.0 for each in found]), _said(baseline)]
    what = "trials, each the mean of its jobs" if is_search else "jobs"
    return [book.finish(figure, "objective", f"Objective over the {what}", " ".join(filter(None, notes)))]


def _draw_random(axes: Axes, comparison: Comparison, every: Sequence[Trial]) -> tuple[list[Artist], list[str]]:
    """Mark the trials that a sampler draws before it looks at results."""
    plan = comparison.plan
    names = [each.name for each in every if each.name.isdecimal() and len(each.name) < 10]
    # Trials that have no jobs, as their points had been drawn before, are not in the figure.
    num = sum(int(name) // plan.repeats < plan.num_random for name in names)
    if not 0 < num < len(every):
        return [], []
    axes.axvspan(-0.5, num - 0.5, color=light("muted"), alpha=0.12, linewidth=0)
    return [Patch(color=light("muted"), alpha=0.25)], ["random start"]


def _draw_values(
    axes: Axes, places: Sequence[int], found: Sequence[Trial], seen: VisibleRange
) -> tuple[list[Artist], list[str]]:
    handles: list[Artist] = []
    statuses = list(dict.fromkeys(each.status for each in found))
    for status in statuses:
        own = [(place, each.value or 0.0) for place, each in zip(places, found, strict=True) if each.status == status]
        colour = light("problem-0" if status == "finished" else COLOURS.get(status, "interrupted"))
        face = colour if status == "finished" else "none"
        handles.append(Line2D([], [], marker="o", linestyle="none", color=colour, markerfacecolor=face, markersize=4))
        for mark in "o^v":
            some = [(place, value) for place, value in own if _marker(value, seen) == mark]
            if some:
                x, y = zip(*some, strict=True)
                axes.plot(x, seen.clip(y), mark, color=colour, markerfacecolor=face, markersize=4, alpha=0.85)
    return handles, statuses


def _draw_baseline(axes: Axes, baseline: Baseline, count: int, seen: VisibleRange) -> Artist:
    values = seen.clip(baseline.best[:count])
    if len(values) < count:
        # It has fewer trials: its last best goes on as it was.
        values = np.append(values, np.full(count - len(values), values[-1]))
    [line] = axes.step(range(count), values, where="post", color=light("muted"), linewidth=1.0, linestyle=(0, (4, 2)))
    assert isinstance(line, Line2D)
    return line


def _said(baseline: Baseline | None) -> str:
    return "" if baseline is None else f"The random search is that of {shortened(baseline.name, 60)}."


def _marker(value: float, seen: VisibleRange) -> str:
    return "^" if value > seen.high else "v" if value < seen.low else "o"
