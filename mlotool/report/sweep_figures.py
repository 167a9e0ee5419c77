"""The figures of a sweep: its hyperparameters, their importance, and the objective of jobs, trials and settings."""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from mlotool.report.figure import (
    DASHES,
    SIZE_INCHES,
    WIDE_INCHES,
    Card,
    Sketchbook,
    VisibleRange,
    bars,
    legend_above,
    light,
    use_log_scale,
    visible_range,
    whole_numbers,
)
from mlotool.report.formats import LARGEST, NONE, shortened, shortened_key
from mlotool.report.rank_correlation import RankCorrelation, importances, rank_correlation
from mlotool.report.run_folder import Series, read_series
from mlotool.report.search import Trial, best_so_far, better, front, points, random_baseline, trials
from mlotool.report.sweep import Column, Comparison, Setting, SweepRow, counts, shown

MAX_CURVES, MAX_POINTS, MAX_SETTINGS = 200, 120, 40
MAX_AXES, MAX_TICKS, MAX_BARS = 10, 6, 10
MIN_PAIRS = 3
MANY = 30
"""A figure of more trials takes a row of the page, as does one of a search with more to be told."""

# Ticks nearer to each other than this share of the axis would be printed over one another.
TICK_DISTANCE = 0.055
# Characters that fit between the first and the last axis of a wide figure.
CHARACTERS_ACROSS = 118
# The status of a job as a figure shows it: dashes, and the name of a colour.
STYLES: dict[str, tuple[Any, str]] = {
    "finished": ("-", "problem-0"),
    "running": ("-", "problem-2"),
    "pruned": ((0, (3, 2)), "muted"),
    "failed": ((0, (1, 1.5)), "failed"),
}
OTHER_STYLE: tuple[Any, str] = ((0, (3, 2)), "interrupted")


def sweep_cards(book: Sketchbook, comparison: Comparison) -> tuple[list[Card], list[Card]]:
    """Return the figures of the hyperparameters, and those of the objective."""
    curves = curve_cards(book, comparison, read_curves(comparison))
    own = [*_setting_card(book, comparison), *_history_cards(book, comparison), *importance_cards(book, comparison)]
    parallel, two = parallel_cards(book, comparison), front_cards(book, comparison)
    return parallel, [*curves, *own, *two, *inherited_cards(book, comparison)]


def _sentences(*notes: str) -> str:
    return " ".join(filter(None, notes))


def read_curves(comparison: Comparison) -> list[tuple[SweepRow, Series]]:
    """Read the objective of the jobs from their metrics.csv; of the best setting's first."""
    rows = sorted(comparison.rows, key=lambda row: row.job not in comparison.best_jobs)[:MAX_CURVES]
    found = ((row, each) for row in rows for each in read_series(row.folder)[0])
    return [(row, each) for row, each in found if each.key == comparison.objective and len(each.finite)]


def curve_cards(book: Sketchbook, comparison: Comparison, curves: Sequence[tuple[SweepRow, Series]]) -> list[Card]:
    """Overlay the objective of all jobs; nothing where none has two evaluations."""
    if not any(len(series.ticks) > 1 for _, series in curves):
        return []
    figure, axes = book.new(WIDE_INCHES)
    best, named = comparison.best_jobs, {}
    many = comparison.best is not None and len(comparison.best.rows) > 1
    # Legend and layers go from what ended to what stands out.
    for row, series in sorted(curves, key=lambda each: (each[0].job in best, each[0].status == "running")):
        is_best = row.job in best
        style, colour = STYLES.get(row.status, OTHER_STYLE)
        colour = light("problem-1" if is_best else colour)
        keep = np.unique(np.linspace(0, len(series.ticks) - 1, MAX_POINTS).round().astype(int))
        width, alpha = (1.7, 1.0) if is_best else (1.0, 0.55)
        axes.plot(series.ticks[keep], series.values[keep], color=colour, linestyle=style, linewidth=width, alpha=alpha,
                  marker="o" if len(keep) <= 10 else None, markersize=2.5)  # fmt: skip
        label = ("best setting" if many else f"best: job {row.job}") if is_best else row.status
        # A pale line in the legend would not be found again among many.
        named.setdefault(label, Line2D([], [], color=colour, linestyle=style, linewidth=1.6))
    seen = visible_range([float(value) for _, series in curves for value in series.finite])
    seen.apply(axes)
    whole_numbers(axes, "tick")
    axes.set_ylabel(shortened(comparison.objective, 40))
    legend_above(axes, list(named.values())[::-1], list(named)[::-1])
    far = [
        max(series.finite.tolist(), key=lambda value: max(value - seen.high, seen.low - value)) for _, series in curves
    ]
    num = len(comparison.rows)
    left = f"Only {MAX_CURVES} of {num} jobs are drawn." if num > MAX_CURVES else ""
    note = _sentences(seen.note([row.job for row, _ in curves], far), left)
    return [book.finish(figure, "curves", f"{comparison.objective} while the jobs trained", note)]


def _setting_card(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective of each setting with its seeds."""
    ranked = comparison.ranked[:MAX_SETTINGS]
    if not ranked or not comparison.has_seeds:
        return []
    figure, axes = book.new()
    values = [value for each in ranked for value in each.values]
    seen = visible_range(values)
    for place, each in enumerate(ranked):
        _draw_setting(axes, place, each, seen, light("problem-1" if each is comparison.best else "problem-0"))
    seen.apply(axes)
    axes.set_xlim(-0.6, len(ranked) - 0.4)
    places = range(0, len(ranked), max(1, -(-len(ranked) // 12))) if len(ranked) > 1 else range(0)
    axes.set_xticks(list(places), [str(place + 1) for place in places])
    axes.set_xlabel("setting, by rank" if len(ranked) > 1 else "")
    axes.set_ylabel(shortened(comparison.objective, 40))
    style: dict[str, Any] = {"linestyle": "none", "color": light("problem-0")}
    handles = [Line2D([], [], marker="o", alpha=0.6, markersize=3.5, **style),
               Line2D([], [], marker="_", markersize=12, markeredgewidth=2, **style),
               Line2D([], [], color=light("problem-1"), linewidth=2)]  # fmt: skip
    num = 3 if comparison.best in ranked else 2
    legend_above(axes, handles[:num], ["a seed", "mean ± standard error", "best setting"][:num])
    names = [row.job for each in ranked for row in each.rows if counts(row, comparison.objective)]
    left = len(comparison.ranked) - len(ranked)
    more = f"The best {MAX_SETTINGS} are drawn; {left} more are in the table." if left else ""
    title = f"Objective of the {'settings' if len(comparison.settings) > 1 else 'seeds'}"
    return [book.finish(figure, "objective", title, _sentences(seen.note(names, values), more))]


def _draw_setting(axes: Axes, place: int, setting: Setting, seen: VisibleRange, colour: str) -> None:
    """Draw the seeds side by side, and their mean; what lies beyond the axis is a triangle at its end."""
    num, mean, error = len(setting.values), setting.mean, setting.standard_error
    for at, value in zip(place + np.linspace(-0.12, 0.12, num) * (num > 1), setting.values, strict=True):
        axes.plot([at], seen.clip([value]), seen.marker(value), color=colour, alpha=0.45, markersize=3.5)
    if mean is not None and seen.low <= mean <= seen.high:
        axes.errorbar([place], [mean], yerr=None if error is None else [error], fmt="_", color=colour,
                      markersize=15, markeredgewidth=2, capsize=4, linewidth=1.4)  # fmt: skip


def _history_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective over the trials of a search, or over the jobs of a sweep; nothing below two values.

    Where there is a finished random search of the same recipe beside the sweep, its best so far is a thin line.
    """
    is_search = comparison.plan.repeats > 1
    every = trials(comparison)
    known = {place: each.value for place, each in enumerate(every)
             if each.value is not None and abs(each.value) < LARGEST}  # fmt: skip
    if len(known) < 2 or (comparison.has_seeds and not is_search):
        return []
    baseline = random_baseline(comparison)
    is_wide = len(every) > MANY or baseline is not None or comparison.plan.num_random > 0
    figure, axes = book.new(WIDE_INCHES if is_wide else SIZE_INCHES)
    seen = visible_range(list(known.values()))
    drawn: dict[str, Artist] = {}
    best = best_so_far(every, comparison.mode)
    if comparison.mode and not np.isnan(best).all():
        [drawn["best so far"]] = axes.step(range(len(every)), seen.clip(best), where="post", color=light("problem-1"),
                                           zorder=3)  # fmt: skip
    if baseline is not None:
        # Where it has fewer trials, its last best goes on as it was.
        values = baseline.best[np.minimum(np.arange(len(every)), len(baseline.best) - 1)]
        [drawn["random search"]] = axes.step(range(len(every)), seen.clip(values), where="post", color=light("muted"),
                                             linewidth=1.0, linestyle=(0, (4, 2)))  # fmt: skip
    # Trials that have no jobs, as their points had been drawn before, are not in the figure.
    names = [int(each.name) for each in every if each.name.isdecimal() and len(each.name) < 10]
    num_random = sum(name // comparison.plan.repeats < comparison.plan.num_random for name in names)
    if 0 < num_random < len(every):
        axes.axvspan(-0.5, num_random - 0.5, color=light("muted"), alpha=0.12, linewidth=0)
        drawn["random start"] = Patch(color=light("muted"), alpha=0.25)
    drawn |= _draw_trials(axes, every, known, seen)
    seen.apply(axes)
    whole_numbers(axes, "trial" if is_search else "job")
    axes.set_ylabel(shortened(comparison.objective, 40))
    legend_above(axes, list(drawn.values()), list(drawn))
    said = "" if baseline is None else f"The random search is that of {shortened(baseline.name, 60)}."
    note = _sentences(seen.note([every[place].name for place in known], list(known.values())), said)
    what = "trials, each the mean of its jobs" if is_search else "jobs"
    return [book.finish(figure, "objective", f"Objective over the {what}", note)]


def _draw_trials(axes: Axes, every: Sequence[Trial], known: dict[int, float], seen: VisibleRange) -> dict[str, Artist]:
    handles: dict[str, Artist] = {}
    for status in dict.fromkeys(every[place].status for place in known):
        colour = light(STYLES.get(status, OTHER_STYLE)[1])
        style: dict[str, Any] = {"color": colour, "markersize": 4, "linestyle": "none",
                                 "markerfacecolor": colour if status == "finished" else "none"}  # fmt: skip
        handles[status] = Line2D([], [], marker="o", **style)
        own = [(place, value) for place, value in known.items() if every[place].status == status]
        for mark in "o^v":
            some = np.array([each for each in own if seen.marker(each[1]) == mark]).reshape(-1, 2)
            if len(some):
                axes.plot(some[:, 0], seen.clip(some[:, 1]), marker=mark, alpha=0.85, **style)
    return handles


def front_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the settings by their two objectives, and their front; nothing below two settings."""
    found, plan = points(comparison), comparison.plan
    if len(found) < 2:
        return []
    best = front(found, comparison.mode, plan.second_mode)
    rest = [each for each in found if each not in best]
    figure, axes = book.new()
    up, across = (visible_range([getattr(each, which) for each in found]) for which in ("first", "second"))
    # Between two of its points the front has nothing better than the corner.
    where: Literal["post", "pre"] = "post" if plan.second_mode == "min" else "pre"
    handles = []
    for some, colour in ((rest, "problem-0"), (best, "problem-1")):
        order = sorted(some, key=lambda each: each.second)
        x, y = across.clip([each.second for each in order]), up.clip([each.first for each in order])
        handles += axes.plot(x, y, "o", color=light(colour), alpha=0.5 if some is rest else 1.0,
                             markersize=4 if some is rest else 5.5)  # fmt: skip
    axes.step(x, y, where=where, color=light("problem-1"), linewidth=1.4)
    up.apply(axes)
    if across.is_log:
        use_log_scale(axes, "x")
    axes.margins(x=0.06)
    axes.set_xlabel(shortened(f"{plan.second_objective} ({better(plan.second_mode)})", 60))
    axes.set_ylabel(shortened(comparison.objective, 40))
    axes.tick_params(axis="x", labelsize=7.5)
    num = 2 if rest else 1
    legend_above(axes, handles[::-1][:num], ["Pareto front", "others"][:num])
    num = len(best)
    note = (
        f"{num} of {len(found)} settings {'are' if num > 1 else 'is'} on the front: none is better in both objectives."
    )
    clipped = "Values that crush the others are drawn at the edge." if up.is_clipped or across.is_clipped else ""
    return [book.finish(figure, "pareto", "Two objectives", _sentences(note, clipped))]


def inherited_pairs(comparison: Comparison) -> list[tuple[float, float]]:
    """Return the objective of each finished job before its first tick, with inherited weights, and in the end."""
    key = f"inherited/{comparison.objective}"
    rows = [row for row in comparison.rows if row.status == "finished" and row.value is not None]
    pairs = [(row.metrics[key], row.value or 0.0) for row in rows if key in row.metrics]
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def inherited_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw them with the correlation of their ranks; nothing below three jobs with both."""
    pairs = inherited_pairs(comparison)
    if len(pairs) < MIN_PAIRS:
        return []
    figure, axes = book.new()
    (before, x), (after, y) = ((visible_range(each), each) for each in zip(*pairs, strict=True))
    axes.plot(before.clip(x), after.clip(y), "o", color=light("problem-0"), alpha=0.6, markersize=4.5)
    after.apply(axes)
    axes.set_xlabel(shortened(f"{comparison.objective}, inherited weights", 60))
    axes.set_ylabel(shortened(f"{comparison.objective}, trained", 40))
    return [book.finish(figure, "inherited", "Inherited and trained", correlation_note(rank_correlation(pairs)))]


def correlation_note(found: RankCorrelation) -> str:
    """Say what a correlation is, in a sentence.

    Example:
        >>> correlation_note(RankCorrelation(0.5, 0.1, 0.8, 20))
        'Rank correlation (Spearman) of 20 jobs: 0.50, bootstrap interval of 95 % from 0.10 to 0.80.'
    """
    if math.isnan(found.value):
        return f"The {found.num_pairs} jobs have no rank correlation: one of the two is the same for all."
    interval = f"bootstrap interval of 95 % from {found.low:.2f} to {found.high:.2f}"
    return f"Rank correlation (Spearman) of {found.num_pairs} jobs: {found.value:.2f}, {interval}."


def importance_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw how much each hyperparameter matters for the settings' means; the seed is none of them."""
    done = [index for index, each in enumerate(comparison.settings) if each.values]
    columns = [each for each in (column.take(done) for column in comparison.columns) if len(set(each.texts)) > 1]
    means = [comparison.settings[index].mean or 0.0 for index in done]
    # A single one decides alone.
    if len(columns) < 2:
        return []
    # One that is a million times off would have all of the variance.
    seen = visible_range(means)
    method, found = importances(columns, seen.clip(means).tolist())
    if not found:
        return []
    figure, axes = book.new()
    top = found[:MAX_BARS][::-1]
    values = [value for _, value in top]
    names = [shortened_key(label, 26) for label, _ in top]
    bars(axes, names, values, ["problem-0"] * len(top), max(1.0, 1.12 * max(values)))
    over = "settings, each the mean of its jobs that finished" if comparison.has_seeds else "jobs that finished"
    clipped = "; values that crush the others are clipped" if seen.is_clipped else ""
    is_partial = any(None in column.texts for column in columns)
    partial = "; where a decision was not asked for, that counts as a value of it" if is_partial else ""
    note = f"{method[0].upper()}{method[1:]}, over the {len(done)} {over}{clipped}{partial}."
    return [book.finish(figure, "importance", "Importance of the hyperparameters", note)]


def parallel_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw hyperparameters beside each other, a line a setting; nothing below two settings with a value."""
    drawn = [index for index, each in enumerate(comparison.settings) if each.drawn is not None]
    differing = [column for column in (each.take(drawn) for each in comparison.columns) if len(set(column.texts)) > 1]
    if not differing:
        return []
    settings, columns = [comparison.settings[index] for index in drawn], differing[: MAX_AXES - 1]
    values = [each.drawn or 0.0 for each in settings]
    seen = visible_range(values)
    # Two axes or three fit a telephone.
    is_wide = len(columns) > 2
    figure, axes = book.new(WIDE_INCHES if is_wide else SIZE_INCHES)
    budget = CHARACTERS_ACROSS // (1 if is_wide else 2) // (len(columns) + 1)
    label = f"{comparison.objective}, mean" if comparison.has_seeds else comparison.objective
    scales = [_scale(column, budget) for column in columns]
    scales.append(_Scale(wrapped(label, budget), *_places(np.asarray(values), seen)))
    _draw_lines(axes, comparison, settings, np.stack([scale.heights for scale in scales], axis=1))
    _draw_scales(axes, scales)
    figure.legend(*_legend(comparison, settings), loc="outside lower left", ncols=4 if is_wide else 2)
    whose = "the mean of jobs" if comparison.has_seeds else "job"
    left = len(differing) - len(columns)
    more = f"{left} more hyperparameter{'s are' if left > 1 else ' is'} not drawn." if left else ""
    note = _sentences(seen.note([each.jobs for each in settings], values, whose), more)
    return [book.finish(figure, "parallel", "Hyperparameters and objective", note)]


def _draw_lines(axes: Axes, comparison: Comparison, settings: Sequence[Setting], heights: NDArray[np.float64]) -> None:
    # The better a setting, the stronger its line, and the later it is drawn.
    sign = 1 if comparison.mode == "min" else -1
    worst_first = sorted(range(len(settings)), key=lambda index: -sign * (settings[index].drawn or 0.0))
    for rank, index in enumerate(worst_first):
        setting = settings[index]
        style: dict[str, Any] = {"alpha": 0.2 + 0.6 * rank / len(settings), "linewidth": 1.1, "zorder": 2}
        if setting is comparison.best:
            style = {"alpha": 1.0, "linewidth": 2.2, "zorder": 3}
        colour = "problem-1" if setting is comparison.best else "problem-0" if setting.values else "muted"
        axes.plot(heights[index], color=light(colour), linestyle="-" if setting.values else DASHES, **style)


def _legend(comparison: Comparison, settings: Sequence[Setting]) -> tuple[list[Line2D], list[str]]:
    handles, labels = [], []
    best = comparison.best
    if best is not None:
        handles.append(Line2D([], [], color=light("problem-1"), linewidth=2.2))
        labels.append(
            shortened(f"best setting: jobs {best.jobs}" if len(best.rows) > 1 else f"best: job {best.jobs}", 40)
        )
    if any(each.values for each in settings if each is not best):
        handles.append(Line2D([], [], color=light("problem-0")))
        labels.append("others, better ones stronger")
    rest = {row.status for each in settings if not each.values for row in each.rows if row.value is not None}
    if rest:
        handles.append(Line2D([], [], color=light("muted"), linestyle=DASHES))
        labels.append(", ".join(sorted(rest)))
    return handles, labels


@dataclass(frozen=True)
class _Scale:
    """A vertical axis between 0 and 1: its label, where each setting is, and its ticks with their texts."""

    label: str
    heights: NDArray[np.float64]
    ticks: list[tuple[float, str]]


def _scale(column: Column, budget: int) -> _Scale:
    label, numbers, names = wrapped(column.label, budget), column.numbers, column.names
    if numbers is not None:
        return _Scale(
            label, *_places(np.asarray(numbers), VisibleRange(min(numbers), max(numbers), column.is_log, False))
        )
    place = {name: (index + 0.5) / len(names) for index, name in enumerate(names)}
    heights = np.array([place[NONE if text is None else text] for text in column.texts])
    ticks = [(at, shortened(shown(name), max(6, budget - 4))) for name, at in place.items()]
    return _Scale(label, heights, _apart(ticks))


def _places(values: NDArray[np.float64], span: VisibleRange) -> tuple[NDArray[np.float64], list[tuple[float, str]]]:
    """Return where values are on an axis, and its ticks: all values where they are few, else round numbers."""
    if span.low == span.high:
        return np.full(len(values), 0.5), [(0.5, f"{span.low:.4g}")]
    # Where some values lie outside, the end of the axis stands for them.
    signs = {span.low: "≤ " if values.min() < span.low else "", span.high: "≥ " if values.max() > span.high else ""}
    values = span.clip(values)
    ticks = sorted(set(values.tolist()))
    if len(ticks) > MAX_TICKS:
        locator: Any = MaxNLocator(5, integer=all(each.is_integer() for each in ticks))
        if span.is_log:
            locator = LogLocator(subs=(1, 2, 5) if span.high < 100 * span.low else (1,), numticks=8)
        inside = [float(each) for each in locator.tick_values(span.low, span.high)]
        ticks = [span.low, *(each for each in inside if span.low < each < span.high), span.high]
    scale = np.log10 if span.is_log else np.asarray
    low, high = scale(span.low), scale(span.high)
    heights, at = ((scale(np.asarray(each)) - low) / (high - low) for each in (values, ticks))
    texts = [f"{signs.get(each, '')}{each:.3g}" for each in ticks]
    return np.clip(heights, 0.0, 1.0), _apart(list(zip(at.tolist(), texts, strict=True)))


def wrapped(label: str, width: int) -> str:
    """Return a dotted label in at most three lines of `width` characters, broken after dots and underscores."""
    # textwrap breaks at blanks: those that are put in for it are taken out again, others are of another kind.
    solid = label.replace(" ", "\N{NO-BREAK SPACE}")
    broken = re.sub(r"(?<=[./_\N{NO-BREAK SPACE}])", " ", solid) if len(label) > width else solid
    lines = [line.replace(" ", "") for line in textwrap.wrap(broken, max(6, width))]
    lines = [f"…{lines[-3]}", *lines[-2:]] if len(lines) > 3 else lines
    return "\n".join(shortened(each, max(6, width)) for each in lines)


def _apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the ticks, the ends and of the rest those that are not too near to the one before."""
    kept = ticks[:1]
    for tick in ticks[1:-1]:
        if tick[0] - kept[-1][0] >= TICK_DISTANCE and ticks[-1][0] - tick[0] >= TICK_DISTANCE:
            kept.append(tick)
    return [*kept, *ticks[-1:]] if len(ticks) > 1 else kept


def _draw_scales(axes: Axes, scales: Sequence[_Scale]) -> None:
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(-0.3, len(scales) - 0.55)
    axes.set_xticks(range(len(scales)), [scale.label for scale in scales])
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelsize=8, labelcolor=light("ink"))
    box = {"boxstyle": "round,pad=0.15", "facecolor": light("card"), "edgecolor": "none", "alpha": 0.85}
    style: dict[str, Any] = {"color": light("muted"), "linewidth": 0.8, "zorder": 4}
    for place, scale in enumerate(scales):
        axes.plot([place, place], [0, 1], **style)
        for height, text in scale.ticks:
            axes.plot([place - 0.012, place + 0.012], [height, height], **style)
            axes.text(place + 0.025, height, text, va="center", color=light("ink"), fontsize=7, bbox=box, zorder=5)
