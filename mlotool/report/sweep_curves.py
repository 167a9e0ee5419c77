"""The objective of a sweep: of each job while it trained, of each setting, of the jobs in their order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mlotool.report.figure import WIDE_INCHES, Card, Sketchbook, legend_above, whole_ticks
from mlotool.report.formats import shortened
from mlotool.report.palette import light
from mlotool.report.series import Series, read_series
from mlotool.report.sweep import SweepRow
from mlotool.report.sweep_history import history_cards
from mlotool.report.sweep_settings import Comparison, Setting, counts
from mlotool.report.visible_range import VisibleRange, visible_range

MAX_CURVES = 200
MAX_POINTS = 120
MAX_SETTINGS = 40
# The status of a job as a curve shows it: dashes, and the name of a colour.
STYLES: dict[str, tuple[object, str]] = {
    "finished": ("-", "problem-0"),
    "running": ("-", "problem-2"),
    "pruned": ((0, (3, 2)), "muted"),
    "failed": ((0, (1, 1.5)), "failed"),
}
OTHER_STYLE: tuple[object, str] = ((0, (3, 2)), "interrupted")


@dataclass(frozen=True)
class Curve:
    """The objective of one job over its ticks."""

    row: SweepRow
    series: Series


def read_curves(comparison: Comparison) -> list[Curve]:
    """Read the objective of the jobs from their metrics.csv; of the best setting's first."""
    best = set() if comparison.best is None else {row.job for row in comparison.best.rows}
    rows = sorted(comparison.rows, key=lambda row: row.job not in best)[:MAX_CURVES]
    found = ((row, read_series(row.folder)[0]) for row in rows)
    return [
        Curve(row, each)
        for row, series in found
        for each in series
        if f"{each.owner}/{each.metric}" == comparison.objective and len(each.finite)
    ]


def curve_cards(book: Sketchbook, comparison: Comparison, curves: Sequence[Curve]) -> list[Card]:
    """Overlay the objective of all jobs; nothing where none has two evaluations."""
    if not any(len(curve.series.ticks) > 1 for curve in curves):
        return []
    figure, axes = book.new(WIDE_INCHES)
    best = set() if comparison.best is None else {row.job for row in comparison.best.rows}
    shown: dict[str, Line2D] = {}
    # Legend and layers go from what ended to what stands out.
    for curve in sorted(curves, key=lambda curve: (curve.row.job in best, curve.row.status == "running")):
        is_best = curve.row.job in best
        style, colour = STYLES.get(curve.row.status, OTHER_STYLE)
        keep = np.unique(np.linspace(0, len(curve.series.ticks) - 1, MAX_POINTS).round().astype(int))
        [line] = axes.plot(
            curve.series.ticks[keep],
            curve.series.values[keep],
            color=light("problem-1" if is_best else colour),
            linestyle=style,
            linewidth=1.7 if is_best else 1.0,
            alpha=1.0 if is_best else 0.55,
            marker="o" if len(keep) <= 10 else None,
            markersize=2.5,
        )
        label = _best_label(comparison) if is_best else curve.row.status
        # A pale line in the legend would not be found again among many.
        shown.setdefault(label, Line2D([], [], color=line.get_color(), linestyle=style, linewidth=1.6))
    seen = visible_range([float(value) for curve in curves for value in curve.series.finite])
    seen.apply(axes)
    whole_ticks(axes)
    axes.set_ylabel(shortened(comparison.objective, 40))
    legend_above(axes, list(shown.values())[::-1], list(shown)[::-1])
    far = [_furthest(curve.series, seen.low, seen.high) for curve in curves]
    notes = [seen.note([curve.row.job for curve in curves], far)]
    if len(comparison.rows) > MAX_CURVES:
        notes.append(f"Only {MAX_CURVES} of {len(comparison.rows)} jobs are drawn.")
    return [
        book.finish(figure, "curves", f"{comparison.objective} while the jobs trained", " ".join(filter(None, notes)))
    ]


def _best_label(comparison: Comparison) -> str:
    assert comparison.best is not None
    return "best setting" if len(comparison.best.rows) > 1 else f"best: job {comparison.best.jobs}"


def _furthest(series: Series, low: float, high: float) -> float:
    values = series.finite
    above, below = float(values.max()), float(values.min())
    return above if above - high >= low - below else below


def objective_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective of each setting with its seeds; that of the jobs, or of a search's trials, in their order."""
    if not comparison.has_seeds:
        return history_cards(book, comparison)
    is_search = comparison.plan.repeats > 1
    return [*_setting_card(book, comparison), *(history_cards(book, comparison) if is_search else [])]


def _setting_card(book: Sketchbook, comparison: Comparison) -> list[Card]:
    ranked = comparison.ranked[:MAX_SETTINGS]
    if not ranked:
        return []
    figure, axes = book.new()
    values = [value for each in ranked for value in each.values]
    seen = visible_range(values)
    for place, each in enumerate(ranked):
        _draw_setting(axes, place, each, seen, light("problem-1" if each is comparison.best else "problem-0"))
    seen.apply(axes)
    axes.set_xlim(-0.6, len(ranked) - 0.4)
    _name_settings(axes, ranked)
    axes.set_xlabel("setting, by rank" if len(ranked) > 1 else "")
    axes.set_ylabel(shortened(comparison.objective, 40))
    dot = Line2D([], [], marker="o", linestyle="none", color=light("problem-0"), alpha=0.6, markersize=3.5)
    mean = Line2D([], [], marker="_", linestyle="none", color=light("problem-0"), markersize=12, markeredgewidth=2)
    handles, labels = [dot, mean], ["a seed", "mean ± standard error"]
    if comparison.best in ranked:
        handles.append(Line2D([], [], color=light("problem-1"), linewidth=2))
        labels.append("best setting")
    legend_above(axes, handles, labels)
    names = [job for each in ranked for job in _jobs_with_values(each, comparison.objective)]
    notes = [seen.note(names, values)]
    left = len(comparison.ranked) - len(ranked)
    notes.append(f"The best {MAX_SETTINGS} are drawn; {left} more are in the table." if left else "")
    title = "Objective of the settings" if len(comparison.settings) > 1 else "Objective of the seeds"
    return [book.finish(figure, "objective", title, " ".join(filter(None, notes)))]


def _draw_setting(axes: Axes, place: int, setting: Setting, seen: VisibleRange, colour: str) -> None:
    """Draw the seeds side by side, and their mean; what lies beyond the axis is a triangle at its end."""
    num = len(setting.values)
    places = place + (np.linspace(-0.12, 0.12, num) if num > 1 else np.zeros(1))
    for each, value in zip(places, setting.values, strict=True):
        axes.plot([each], seen.clip([value]), _marker(value, seen), color=colour, alpha=0.45, markersize=3.5)
    mean, error = setting.mean, setting.standard_error
    if mean is not None and seen.low <= mean <= seen.high:
        axes.errorbar([place], [mean], yerr=None if error is None else [error], fmt="_", color=colour,
                      markersize=15, markeredgewidth=2, capsize=4, linewidth=1.4)  # fmt: skip


def _marker(value: float, seen: VisibleRange) -> str:
    return "^" if value > seen.high else "v" if value < seen.low else "o"


def _name_settings(axes: Axes, ranked: Sequence[Setting]) -> None:
    step = max(1, -(-len(ranked) // 12))
    places = range(0, len(ranked), step) if len(ranked) > 1 else []
    axes.set_xticks(list(places), [str(place + 1) for place in places])


def _jobs_with_values(setting: Setting, objective: str) -> list[str]:
    return [row.job for row in setting.rows if counts(row, objective)]
