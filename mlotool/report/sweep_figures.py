"""The figures of a sweep: its hyperparameters, their importance, and the objective of jobs, trials and settings."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from scipy.stats import spearmanr

from mlotool.report.figure import SIZE_INCHES, WIDE_INCHES, Card, Sketchbook, light, visible_range
from mlotool.report.formats import NONE, shortened, shortened_key
from mlotool.report.run_folder import read_series
from mlotool.report.search import best_so_far, front, points
from mlotool.report.sweep import Column, Comparison, Setting, better, shown

MAX_CURVES, MAX_POINTS = 200, 120
MAX_SLICES, MAX_BARS = 9, 10
MIN_PAIRS = 3
MIN_JOBS = 6
# A figure of more trials takes a row of the page, as does one of a search with more to be told.
MANY = 30
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
    draw = (curve_cards, objective_cards, importance_cards, front_cards, inherited_cards)
    cards = [card for cards_of in draw for card in cards_of(book, comparison)]
    return slice_cards(book, comparison), cards


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


def objective_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective of each setting, in the order of their first jobs, with its seeds, and the best so far."""
    settings, drawn = comparison.settings, dict[str, Any]()
    known = {place: setting for place, setting in enumerate(settings) if setting.drawn is not None}
    if len(known) < 2 and not any(len(setting.values) > 1 for setting in known.values()):
        return []
    plot = book.new(WIDE_INCHES if len(settings) > MANY else SIZE_INCHES)
    seen = visible_range([value for one in known.values() for value in one.values or [one.drawn or 0.0]])
    if comparison.mode and comparison.plan.sampler:
        style: dict[str, Any] = {"where": "post", "color": light("problem-1"), "zorder": 3}
        [drawn["best so far"]] = plot.axes.step(range(len(settings)), seen.clip(best_so_far(comparison)), **style)
    if comparison.has_seeds:
        across, values = zip(*((place, value) for place, one in known.items() for value in one.values), strict=True)
        style = {"color": light("problem-0"), "alpha": 0.45, "markersize": 3.5}
        [drawn["a seed"]] = plot.axes.plot(across, seen.clip(values), "o", **style)
    kinds = {place: "best" if one is comparison.best else one.status for place, one in known.items()}
    for kind in dict.fromkeys(kinds.values()):
        places = [place for place in known if kinds[place] == kind]
        colour = light("problem-1" if kind == "best" else STYLES.get(kind, OTHER_STYLE)[1])
        style = {"color": colour, "markersize": 5, "capsize": 4, "fmt": "D" if comparison.has_seeds else "o"}
        errors = [known[place].standard_error or 0.0 for place in places] if comparison.has_seeds else None
        heights = seen.clip([known[place].drawn or 0.0 for place in places])
        drawn[kind] = plot.axes.errorbar(places, heights, errors, **style)
    seen.apply(plot)
    plot.label("setting" if comparison.has_seeds else "job", comparison.objective, is_whole=True)
    plot.legend(list(drawn.values()), list(drawn))
    what = "settings: the mean ± standard error of their seeds" if comparison.has_seeds else "jobs"
    return [plot.card("objective", f"Objective of the {what}", seen.note)]


def front_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the settings by their two objectives, and their front; nothing below two settings."""
    every, plan = points(comparison), comparison.plan
    if len(every) < 2:
        return []
    best = front(every, comparison.mode, plan.second_mode)
    rest = [setting for setting in every if setting not in best]
    plot = book.new()
    up, across = (visible_range(values) for values in zip(*map(_objectives, every), strict=True))
    for some, name, colour, style in (
        (rest, "others", "problem-0", {"alpha": 0.5, "markersize": 4}),
        (best, "Pareto front", "problem-1", {"markersize": 5.5}),
    ):
        order = np.array(sorted(map(_objectives, some), key=lambda pair: pair[1])).reshape(-1, 2)
        x, y = across.clip(order[:, 1]), up.clip(order[:, 0])
        if some:
            plot.axes.plot(x, y, "o", color=light(colour), label=name, **style)  # type: ignore[arg-type]
    # Between two of its points the front has nothing better than the corner.
    where: Literal["post", "pre"] = "post" if plan.second_mode == "min" else "pre"
    plot.axes.step(x, y, where=where, color=light("problem-1"), linewidth=1.4)
    up.apply(plot)
    if across.is_log:
        plot.use_log_scale("x")
    plot.label(f"{plan.second_objective} ({better(plan.second_mode)})", comparison.objective)
    plot.legend()
    are = f"{len(best)} of {len(every)} settings {'are' if len(best) > 1 else 'is'}"
    note = _sentences(f"{are} on the front: none is better in both objectives.", up.note or across.note)
    return [plot.card("pareto", "Two objectives", note)]


def _objectives(setting: Setting) -> tuple[float, float]:
    return setting.mean or 0.0, setting.second or 0.0


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
    if len(set(x)) == 1 or len(set(y)) == 1:
        note = f"The {len(pairs)} jobs have no rank correlation: one of the two is the same for all."
    else:
        note = f"Rank correlation (Spearman) of {len(pairs)} jobs: {spearmanr(x, y).statistic:.2f}."
    return [plot.card("inherited", "Inherited and trained", note)]


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
    ranked = importances(columns, seen.clip(means).tolist())
    if not ranked:
        return []
    plot = book.new(left=1.8)
    labels = [shortened_key(label, 26) for label, _ in ranked[:MAX_BARS][::-1]]
    bars = plot.axes.barh(labels, [share for _, share in ranked[:MAX_BARS][::-1]], color=light("problem-0"), height=0.6)
    plot.axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7.5)
    plot.axes.margins(x=0.12)
    plot.axes.grid(visible=False, axis="y")
    over = "settings, each the mean of its jobs that finished" if comparison.has_seeds else "jobs that finished"
    clipped = "; values that crush the others are clipped" if seen.is_clipped else ""
    is_partial = any(None in column.texts for column in columns)
    partial = "; where a decision was not asked for, that counts as a value of it" if is_partial else ""
    note = f"Share of the variance that a random forest explains, over the {len(done)} {over}{clipped}{partial}."
    return [plot.card("importance", "Importance of the hyperparameters", note)]


def _differing(comparison: Comparison, indices: Sequence[int]) -> list[Column]:
    """Return the hyperparameters in which some of the settings differ."""
    columns = (column.take(indices) for column in comparison.columns)
    return [column for column in columns if len(set(column.texts)) > 1]


def slice_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw the objective over each hyperparameter, a dot a setting; nothing where no two with a value differ."""
    drawn = [index for index, setting in enumerate(comparison.settings) if setting.drawn is not None]
    settings = [comparison.settings[index] for index in drawn]
    values = np.array([setting.drawn for setting in settings], dtype=np.float64)
    kinds = ["best" if one is comparison.best else "others" if one.values else "not finished" for one in settings]
    columns, cards = _differing(comparison, drawn), list[Card]()
    for column in columns[:MAX_SLICES]:
        plot, seen = book.new(), visible_range(values.tolist())
        across = np.array(column.numbers or [column.names.index(text or NONE) for text in column.texts])
        for kind, colour in (("not finished", "muted"), ("others", "problem-0"), ("best", "problem-1")):
            chosen = np.array([one == kind for one in kinds])
            style: dict[str, Any] = {"color": light(colour), "label": kind, "alpha": 1.0 if kind == "best" else 0.6}
            if chosen.any():
                plot.axes.plot(across[chosen], seen.clip(values[chosen]), "o", markersize=4.5, **style)
        if column.numbers is None:
            plot.axes.set_xticks(range(len(column.names)), [shortened(shown(name), 12) for name in column.names])
        elif column.is_log:
            plot.use_log_scale("x")
        seen.apply(plot)
        plot.label(column.key, f"{comparison.objective}, mean" if comparison.has_seeds else comparison.objective)
        plot.legend()
        left = f"{len(columns) - MAX_SLICES} more hyperparameters are not drawn." if len(columns) > MAX_SLICES else ""
        cards.append(plot.card(f"over-{column.label}", f"Objective over {column.label}", _sentences(seen.note, left)))
    return cards


def importances(columns: Sequence[Column], objective: Sequence[float]) -> list[tuple[str, float]]:
    """Return how much of the objective's variance a random forest explains by each column, the largest share first.

    Args:
        columns: of the settings that finished; names count as numbers in their order.
        objective: theirs.

    Returns:
        empty where there are too few settings to tell.
    """
    if len(objective) < max(MIN_JOBS, len(columns) + 4) or len(set(objective)) < 2 or not columns:
        return []
    # Not at the top: it takes a second to import.
    from sklearn.ensemble import RandomForestRegressor

    features = [column.numbers or np.unique(list(map(str, column.texts)), return_inverse=True)[1] for column in columns]
    forest = RandomForestRegressor(n_estimators=64, random_state=0).fit(np.stack(features, axis=1), objective)
    shares = zip((column.label for column in columns), forest.feature_importances_.tolist(), strict=True)
    return sorted(shares, key=lambda pair: -pair[1])
