"""The figures of a sweep: its hyperparameters, their importance, and the objective of jobs, trials and settings."""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from mlotool.report.figure import (
    DASHES,
    SIZE_INCHES,
    WIDE_INCHES,
    Card,
    Plot,
    Sketchbook,
    VisibleRange,
    light,
    visible_range,
)
from mlotool.report.formats import LARGEST, NONE, shortened, shortened_key
from mlotool.report.rank_correlation import RankCorrelation, importances, rank_correlation
from mlotool.report.run_folder import read_series
from mlotool.report.search import best_so_far, front, points, random_baseline, trials
from mlotool.report.sweep import Column, Comparison, Setting, better, shown

MAX_CURVES, MAX_POINTS, MAX_SETTINGS = 200, 120, 40
MAX_AXES, MAX_TICKS, MAX_BARS = 10, 6, 10
MIN_PAIRS = 3
# A figure of more trials takes a row of the page, as does one of a search with more to be told.
MANY = 30
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
Ticks = list[tuple[float, str]]


def sweep_cards(book: Sketchbook, comparison: Comparison) -> tuple[list[Card], list[Card]]:
    """Return the figures of the hyperparameters, and those of the objective."""
    draw = (curve_cards, setting_cards, history_cards, importance_cards, front_cards, inherited_cards)
    cards = [card for cards_of in draw for card in cards_of(book, comparison)]
    return parallel_cards(book, comparison), cards


def _sentences(*notes: str) -> str:
    return " ".join(filter(None, notes))


def curve_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Overlay the objective of all jobs, the best setting's first; nothing where none has two evaluations."""
    best, num = comparison.best_jobs, len(comparison.rows)
    rows = sorted(comparison.rows, key=lambda row: row.job not in best)[:MAX_CURVES]
    logged = ((row, series) for row in rows for series in read_series(row.folder)[0])
    curves = [(row, one) for row, one in logged if one.key == comparison.objective and len(one.finite)]
    if not any(len(series.ticks) > 1 for _, series in curves):
        return []
    plot = book.new(WIDE_INCHES)
    named: dict[str, Artist] = {}
    # Legend and layers go from what ended to what stands out.
    for row, series in sorted(curves, key=lambda curve: (curve[0].job in best, curve[0].status == "running")):
        is_best = row.job in best
        dashes, colour = STYLES.get(row.status, OTHER_STYLE)
        style: dict[str, Any] = {"color": light("problem-1" if is_best else colour), "linestyle": dashes}
        keep = np.unique(np.linspace(0, len(series.ticks) - 1, MAX_POINTS).round().astype(int))
        more: dict[str, Any] = {"linewidth": 1.7} if is_best else {"linewidth": 1.0, "alpha": 0.55}
        more |= {"marker": "o" if len(keep) <= 10 else None, "markersize": 2.5}
        plot.axes.plot(series.ticks[keep], series.values[keep], **style, **more)
        label = ("best setting" if len(best) > 1 else f"best: job {row.job}") if is_best else row.status
        # A pale line in the legend would not be found again among many.
        named.setdefault(label, Line2D([], [], linewidth=1.6, **style))
    seen = visible_range([float(value) for _, series in curves for value in series.finite])
    seen.apply(plot)
    plot.label("tick", comparison.objective, is_whole=True)
    plot.legend(list(named.values())[::-1], list(named)[::-1])
    left = f"Only {MAX_CURVES} of {num} jobs are drawn." if num > MAX_CURVES else ""
    return [plot.card("curves", f"{comparison.objective} while the jobs trained", _sentences(seen.note, left))]


def setting_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective of each setting: its seeds side by side, and their mean."""
    ranked = comparison.ranked[:MAX_SETTINGS]
    if not ranked or not comparison.has_seeds:
        return []
    plot = book.new()
    seen = visible_range([value for setting in ranked for value in setting.values])
    for place, setting in enumerate(ranked):
        colour = light("problem-1" if setting is comparison.best else "problem-0")
        across = place + np.linspace(-0.12, 0.12, len(setting.values)) * (len(setting.values) > 1)
        plot.axes.plot(across, seen.clip(setting.values), "o", color=colour, alpha=0.45, markersize=3.5)
        style: dict[str, Any] = {"markersize": 15, "markeredgewidth": 2, "capsize": 4, "linewidth": 1.4}
        plot.axes.errorbar([place], [setting.mean or 0.0], setting.standard_error, fmt="_", color=colour, **style)
    seen.apply(plot)
    plot.axes.set_xlim(-0.6, len(ranked) - 0.4)
    places = list(range(0, len(ranked), -(-len(ranked) // 12))) if len(ranked) > 1 else []
    plot.axes.set_xticks(places, [str(place + 1) for place in places])
    plot.label("setting, by rank" if len(ranked) > 1 else "", comparison.objective)
    style = {"linestyle": "none", "color": light("problem-0")}
    handles = {
        "a seed": Line2D([], [], marker="o", alpha=0.6, markersize=3.5, **style),
        "mean ± standard error": Line2D([], [], marker="_", markersize=12, markeredgewidth=2, **style),
    }
    if comparison.best in ranked:
        handles["best setting"] = Line2D([], [], color=light("problem-1"), linewidth=2)
    plot.legend(list(handles.values()), list(handles))
    left = len(comparison.ranked) - len(ranked)
    more = f"The best {MAX_SETTINGS} are drawn; {left} more are in the table." if left else ""
    title = f"Objective of the {'settings' if len(comparison.settings) > 1 else 'seeds'}"
    return [plot.card("objective", title, _sentences(seen.note, more))]


def history_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective over the trials of a search, or over the jobs of a sweep; nothing below two values.

    Where there is a finished random search of the same recipe beside the sweep, its best so far is a thin line.
    """
    plan, every = comparison.plan, trials(comparison)
    known = {at: one.value for at, one in enumerate(every) if one.value is not None and abs(one.value) < LARGEST}
    if len(known) < 2 or (comparison.has_seeds and plan.repeats == 1):
        return []
    baseline = random_baseline(comparison)
    is_wide = len(every) > MANY or baseline is not None or plan.num_random > 0
    plot = book.new(WIDE_INCHES if is_wide else SIZE_INCHES)
    seen, ticks = visible_range(list(known.values())), range(len(every))
    drawn: dict[str, Artist] = {}
    best = best_so_far(every, comparison.mode)
    style: dict[str, Any] = {"where": "post", "color": light("problem-1"), "zorder": 3}
    if comparison.mode and not np.isnan(best).all():
        [drawn["best so far"]] = plot.axes.step(ticks, seen.clip(best), **style)
    if baseline is not None:
        # Where it has fewer trials, its last best goes on as it was.
        values = baseline.best[np.minimum(ticks, len(baseline.best) - 1)]
        style |= {"color": light("muted"), "linewidth": 1.0, "linestyle": (0, (4, 2))}
        [drawn["random search"]] = plot.axes.step(ticks, seen.clip(values), **style)
    # Trials that have no jobs, as their points had been drawn before, are not in the figure.
    num_random = sum(one.name.isdecimal() and int(one.name) // plan.repeats < plan.num_random for one in every)
    if 0 < num_random < len(every):
        plot.axes.axvspan(-0.5, num_random - 0.5, color=light("muted"), alpha=0.12, linewidth=0)
        drawn["random start"] = Patch(color=light("muted"), alpha=0.25)
    for status in dict.fromkeys(every[at].status for at in known):
        points = {at: value for at, value in known.items() if every[at].status == status}
        colour = light(STYLES.get(status, OTHER_STYLE)[1])
        style = {"color": colour, "markersize": 4, "markerfacecolor": colour if status == "finished" else "none"}
        [drawn[status]] = plot.axes.plot(list(points), seen.clip(list(points.values())), "o", alpha=0.85, **style)
    seen.apply(plot)
    plot.label("trial" if plan.repeats > 1 else "job", comparison.objective, is_whole=True)
    plot.legend(list(drawn.values()), list(drawn))
    said = "" if baseline is None else f"The random search is that of {shortened(baseline.name, 60)}."
    what = "trials, each the mean of its jobs" if plan.repeats > 1 else "jobs"
    return [plot.card("objective", f"Objective over the {what}", _sentences(seen.note, said))]


def front_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the settings by their two objectives, and their front; nothing below two settings."""
    every, plan = points(comparison), comparison.plan
    if len(every) < 2:
        return []
    best = front(every, comparison.mode, plan.second_mode)
    rest = [point for point in every if point not in best]
    plot = book.new()
    up, across = visible_range([point.first for point in every]), visible_range([point.second for point in every])
    handles = {}
    for some, name, colour, style in (
        (rest, "others", "problem-0", {"alpha": 0.5, "markersize": 4}),
        (best, "Pareto front", "problem-1", {"markersize": 5.5}),
    ):
        order = sorted(some, key=lambda point: point.second)
        x, y = across.clip([point.second for point in order]), up.clip([point.first for point in order])
        if some:
            [handles[name]] = plot.axes.plot(x, y, "o", color=light(colour), **style)  # type: ignore[arg-type]
    # Between two of its points the front has nothing better than the corner.
    where: Literal["post", "pre"] = "post" if plan.second_mode == "min" else "pre"
    plot.axes.step(x, y, where=where, color=light("problem-1"), linewidth=1.4)
    up.apply(plot)
    if across.is_log:
        plot.use_log_scale("x")
    plot.axes.margins(x=0.06)
    plot.label(f"{plan.second_objective} ({better(plan.second_mode)})", comparison.objective)
    plot.axes.tick_params(axis="x", labelsize=7.5)
    plot.legend(list(handles.values())[::-1], list(handles)[::-1])
    are = f"{len(best)} of {len(every)} settings {'are' if len(best) > 1 else 'is'}"
    note = _sentences(f"{are} on the front: none is better in both objectives.", up.note or across.note)
    return [plot.card("pareto", "Two objectives", note)]


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
    plot = book.new()
    (before, x), (after, y) = ((visible_range(values), values) for values in zip(*pairs, strict=True))
    plot.axes.plot(before.clip(x), after.clip(y), "o", color=light("problem-0"), alpha=0.6, markersize=4.5)
    after.apply(plot)
    plot.label(f"{comparison.objective}, inherited weights", f"{comparison.objective}, trained")
    return [plot.card("inherited", "Inherited and trained", correlation_note(rank_correlation(pairs)))]


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
    done = [index for index, setting in enumerate(comparison.settings) if setting.values]
    columns = _differing(comparison, done)
    # A single one decides alone.
    if len(columns) < 2:
        return []
    means = [comparison.settings[index].mean or 0.0 for index in done]
    # One that is a million times off would have all of the variance.
    seen = visible_range(means)
    method, ranked = importances(columns, seen.clip(means).tolist())
    if not ranked:
        return []
    plot = book.new()
    rows = {shortened_key(label, 26): (value, "problem-0") for label, value in ranked[:MAX_BARS][::-1]}
    plot.bars(rows, max(1.0, 1.12 * max(value for _, value in ranked)))
    over = "settings, each the mean of its jobs that finished" if comparison.has_seeds else "jobs that finished"
    clipped = "; values that crush the others are clipped" if seen.is_clipped else ""
    is_partial = any(None in column.texts for column in columns)
    partial = "; where a decision was not asked for, that counts as a value of it" if is_partial else ""
    note = f"{method[0].upper()}{method[1:]}, over the {len(done)} {over}{clipped}{partial}."
    return [plot.card("importance", "Importance of the hyperparameters", note)]


def _differing(comparison: Comparison, indices: Sequence[int]) -> list[Column]:
    """Return the hyperparameters in which some of the settings differ."""
    columns = (column.take(indices) for column in comparison.columns)
    return [column for column in columns if len(set(column.texts)) > 1]


def parallel_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw hyperparameters beside each other, a line a setting; nothing below two settings with a value."""
    drawn = [index for index, setting in enumerate(comparison.settings) if setting.drawn is not None]
    differing = _differing(comparison, drawn)
    if not differing:
        return []
    settings, columns = [comparison.settings[index] for index in drawn], differing[: MAX_AXES - 1]
    values = [setting.drawn or 0.0 for setting in settings]
    seen = visible_range(values)
    # Two axes or three fit a telephone.
    is_wide = len(columns) > 2
    plot = book.new(WIDE_INCHES if is_wide else SIZE_INCHES)
    budget = CHARACTERS_ACROSS // (1 if is_wide else 2) // (len(columns) + 1)
    label = f"{comparison.objective}, mean" if comparison.has_seeds else comparison.objective
    scales = [*(_scale(column, budget) for column in columns), _places(np.asarray(values), seen)]
    handles = _draw_lines(plot, comparison, settings, np.stack([heights for heights, _ in scales], axis=1))
    labels = [wrapped(text, budget) for text in (*(column.label for column in columns), label)]
    _draw_scales(plot, labels, [_apart(ticks) for _, ticks in scales])
    plot.figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=4 if is_wide else 2)
    left = len(differing) - len(columns)
    more = f"{left} more hyperparameter{'s are' if left > 1 else ' is'} not drawn." if left else ""
    return [plot.card("parallel", "Hyperparameters and objective", _sentences(seen.note, more))]


def _draw_lines(
    plot: Plot, comparison: Comparison, settings: Sequence[Setting], heights: NDArray[np.float64]
) -> dict[str, Line2D]:
    """Draw a line a setting, the better, the stronger and the later; return what the legend shows."""
    sign, best = 1 if comparison.mode == "min" else -1, comparison.best
    handles: dict[str, Line2D] = {}
    rest = sorted({row.status for one in settings if not one.values for row in one.rows if row.value is not None})
    for rank, index in enumerate(sorted(range(len(settings)), key=lambda at: -sign * (settings[at].drawn or 0.0))):
        setting, alpha = settings[index], 0.2 + 0.6 * rank / len(settings)
        name, style = "others, better ones stronger", {"color": light("problem-0"), "linewidth": 1.1}
        if setting is best:
            name = shortened(f"best{' setting: jobs' if len(best.rows) > 1 else ': job'} {best.jobs}", 40)
            style, alpha = {"color": light("problem-1"), "linewidth": 2.2, "zorder": 3}, 1.0
        elif not setting.values:
            name, style = ", ".join(rest), {"color": light("muted"), "linewidth": 1.1, "linestyle": DASHES}
        plot.axes.plot(heights[index], alpha=alpha, **style)  # type: ignore[arg-type]
        handles.setdefault(name, Line2D([], [], **style))  # type: ignore[arg-type]
    return dict(sorted(handles.items(), key=lambda pair: pair[0]))


def _scale(column: Column, budget: int) -> tuple[NDArray[np.float64], Ticks]:
    """Return where the values of a hyperparameter are on its axis from 0 to 1, and its ticks."""
    numbers, names = column.numbers, column.names
    if numbers is not None:
        return _places(np.asarray(numbers), VisibleRange(min(numbers), max(numbers), column.is_log, False))
    place = {name: (index + 0.5) / len(names) for index, name in enumerate(names)}
    heights = np.array([place[NONE if text is None else text] for text in column.texts])
    return heights, [(at, shortened(shown(name), max(6, budget - 4))) for name, at in place.items()]


def _places(values: NDArray[np.float64], span: VisibleRange) -> tuple[NDArray[np.float64], Ticks]:
    """Return where values are on an axis, and its ticks: all values where they are few, else round numbers."""
    if span.low == span.high:
        return np.full(len(values), 0.5), [(0.5, f"{span.low:.4g}")]
    # Where some values lie outside, the end of the axis stands for them.
    signs = {span.low: "≤ " if values.min() < span.low else "", span.high: "≥ " if values.max() > span.high else ""}
    values = span.clip(values)
    ticks = sorted(set(values.tolist()))
    if len(ticks) > MAX_TICKS:
        locator: Any = MaxNLocator(5, integer=all(tick.is_integer() for tick in ticks))
        if span.is_log:
            locator = LogLocator(subs=(1, 2, 5) if span.high < 100 * span.low else (1,), numticks=8)
        inside = [float(tick) for tick in locator.tick_values(span.low, span.high)]
        ticks = [span.low, *(tick for tick in inside if span.low < tick < span.high), span.high]
    scale = np.log10 if span.is_log else np.asarray
    low, high = scale(span.low), scale(span.high)
    heights, at = ((scale(np.asarray(some)) - low) / (high - low) for some in (values, ticks))
    texts = [f"{signs.get(tick, '')}{tick:.3g}" for tick in ticks]
    return np.clip(heights, 0.0, 1.0), list(zip(at.tolist(), texts, strict=True))


def wrapped(label: str, width: int) -> str:
    """Return a dotted label in at most three lines of `width` characters, broken after dots and underscores."""
    # textwrap breaks at blanks: those that are put in for it are taken out again, others are of another kind.
    solid, width = label.replace(" ", "\N{NO-BREAK SPACE}"), max(6, width)
    broken = re.sub(r"(?<=[./_\N{NO-BREAK SPACE}])", " ", solid) if len(label) > width else solid
    lines = [line.replace(" ", "") for line in textwrap.wrap(broken, width)]
    lines = [f"…{lines[-3]}", *lines[-2:]] if len(lines) > 3 else lines
    return "\n".join(shortened(line, width) for line in lines)


def _apart(ticks: Ticks) -> Ticks:
    """Return the ticks, the ends and of the rest those that are not too near to the one before."""
    kept = ticks[:1]
    for tick in ticks[1:-1]:
        if tick[0] - kept[-1][0] >= TICK_DISTANCE and ticks[-1][0] - tick[0] >= TICK_DISTANCE:
            kept.append(tick)
    return [*kept, *ticks[-1:]] if len(ticks) > 1 else kept


def _draw_scales(plot: Plot, labels: Sequence[str], scales: Sequence[Ticks]) -> None:
    axes = plot.axes
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(-0.3, len(scales) - 0.55)
    axes.set_xticks(range(len(scales)), labels)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelsize=8, labelcolor=light("ink"))
    box = {"boxstyle": "round,pad=0.15", "facecolor": light("card"), "edgecolor": "none", "alpha": 0.85}
    text_style: dict[str, Any] = {"va": "center", "color": light("ink"), "fontsize": 7, "bbox": box, "zorder": 5}
    style: dict[str, Any] = {"color": light("muted"), "linewidth": 0.8, "zorder": 4}
    for place, ticks in enumerate(scales):
        axes.plot([place, place], [0, 1], **style)
        for height, text in ticks:
            axes.plot([place - 0.012, place + 0.012], [height, height], **style)
            axes.text(place + 0.025, height, text, **text_style)
