"""The figures of a sweep: its hyperparameters, their importance, and the objective of jobs, trials and settings."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.stats import pearsonr, rankdata

from mlotool.folders.run_folder import RunFolder
from mlotool.report.figure import SIZE_INCHES, WIDE_INCHES, Card, Sketchbook, light, visible_range
from mlotool.report.formats import NONE, shortened, shortened_key
from mlotool.report.recorded_run import read_series
from mlotool.report.search import best_so_far, front, points, random_baseline
from mlotool.report.sweep import Column, Comparison, Setting, better, shown

MAX_CURVES, MAX_POINTS = 200, 120
MAX_AXES, MAX_TICKS, MAX_BARS = 10, 6, 10
# Ticks that are nearer to each other than this share of an axis would be printed over one another.
TICK_DISTANCE = 0.055
# Characters that fit below the axes of a wide figure.
CHARACTERS_ACROSS = 118
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
    return parallel_cards(book, comparison), cards


def _sentences(*notes: str) -> str:
    return " ".join(filter(None, notes))


def curve_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Overlay the objective of all jobs, the best setting's first; nothing where none has two evaluations."""
    best, num = comparison.best_jobs, len(comparison.rows)
    rows = sorted(comparison.rows, key=lambda row: row.job not in best)[:MAX_CURVES]
    logged = ((row, series) for row in rows for series in read_series(RunFolder(row.folder))[0])
    curves = [(row, series) for row, series in logged if series.key == comparison.objective and len(series.finite)]
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
    baseline, plan, order = random_baseline(comparison), comparison.plan, np.arange(len(settings))
    is_wide = len(settings) > MANY or baseline is not None or plan.num_random > 0
    plot = book.new(WIDE_INCHES if is_wide else SIZE_INCHES)
    beside = [] if baseline is None else baseline.best[np.isfinite(baseline.best)].tolist()
    seen = visible_range([*beside, *(value for one in known.values() for value in one.values or [one.drawn or 0.0])])
    if comparison.mode and plan.sampler:
        style: dict[str, Any] = {"where": "post", "color": light("problem-1"), "zorder": 3}
        [drawn["best so far"]] = plot.axes.step(order, seen.clip(best_so_far(comparison)), **style)
    if baseline is not None:
        # Where the random search has fewer trials, its last best goes on as it was.
        values = seen.clip(baseline.best[np.minimum(order, len(baseline.best) - 1)])
        style = {"where": "post", "color": light("muted"), "linewidth": 1.0, "linestyle": (0, (4, 2))}
        [drawn["random search"]] = plot.axes.step(order, values, **style)
    # Trials whose points had been drawn before have no jobs, and are not in the figure.
    jobs = [setting.rows[0].job for setting in settings]
    num_random = sum(job.isdecimal() and int(job) // plan.repeats < plan.num_random for job in jobs)
    if 0 < num_random < len(settings):
        style = {"color": light("muted"), "alpha": 0.12, "linewidth": 0}
        drawn["random start"] = plot.axes.axvspan(-0.5, num_random - 0.5, **style)
    if comparison.has_seeds:
        pairs = [(place, value) for place, setting in known.items() for value in setting.values]
        across, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        style = {"color": light("problem-0"), "alpha": 0.45, "markersize": 3.5}
        [drawn["a seed"]] = plot.axes.plot(across, seen.clip(values), "o", **style)
    kinds = {place: "best" if setting is comparison.best else setting.status for place, setting in known.items()}
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
    said = "" if baseline is None else f"The random search is the one of {shortened(baseline.name, 60)}."
    return [plot.card("objective", f"Objective of the {what}", _sentences(seen.note, said))]


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
        # Spearman's correlation is that of the ranks.
        correlation = pearsonr(rankdata(x), rankdata(y))
        low, high = correlation.confidence_interval()
        interval = f"interval of 95 % from {low:.2f} to {high:.2f}"
        note = f"Rank correlation (Spearman) of {len(pairs)} jobs: {correlation.statistic:.2f}, {interval}."
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
    partial = "; a decision that was not asked for counts as a value" if is_partial else ""
    note = f"Share of the variance that a random forest explains, over the {len(done)} {over}{clipped}{partial}."
    return [plot.card("importance", "Importance of the hyperparameters", note)]


def _differing(comparison: Comparison, indices: Sequence[int]) -> list[Column]:
    """Return the hyperparameters in which some of the settings differ."""
    columns = (column.take(indices) for column in comparison.columns)
    return [column for column in columns if len(set(column.texts)) > 1]


def parallel_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw hyperparameters and objective as axes, a line per setting; nothing where no two with a value differ."""
    drawn = [index for index, setting in enumerate(comparison.settings) if setting.drawn is not None]
    differing = _differing(comparison, drawn)
    if not differing:
        return []
    settings, columns = [comparison.settings[index] for index in drawn], differing[: MAX_AXES - 1]
    values = np.array([setting.drawn for setting in settings], dtype=np.float64)
    seen, best = visible_range(values.tolist()), comparison.best
    scales = [
        _scale(np.asarray(column.numbers), column.is_log) if column.numbers else _names(column) for column in columns
    ]
    scales.append(_scale(seen.clip(values), seen.is_log))
    # Two axes or three fit a telephone.
    is_wide = len(columns) > 2
    plot = book.new(WIDE_INCHES if is_wide else SIZE_INCHES, left=0.16)
    # The better a setting, the later and the stronger its line.
    order = np.argsort(values if comparison.mode == "max" else -values)
    for strength, place in zip(np.linspace(0.2, 0.8, len(order)), order, strict=True):
        setting = settings[place]
        style: dict[str, Any] = {
            "color": light("problem-0"),
            "label": "others (better ones darker)",
            "alpha": strength,
        }
        if setting is best:
            style = {"color": light("problem-1"), "label": f"best: {best.jobs}", "linewidth": 2.2, "zorder": 3}
        elif not setting.values:
            style |= {"color": light("muted"), "label": setting.status, "linestyle": (0, (2, 2))}
        plot.axes.plot([heights[place] for heights, _ in scales], **style)
    box = {"boxstyle": "round,pad=0.15", "facecolor": light("card"), "edgecolor": "none", "alpha": 0.85}
    for across, (_, ticks) in enumerate(scales):
        plot.axes.plot([across, across], [0, 1], color=light("muted"), linewidth=0.8)
        for height, text in ticks:
            plot.axes.text(across + 0.03, height, text, va="center", fontsize=7, bbox=box, zorder=5)
    label = f"{comparison.objective}, mean" if comparison.has_seeds else comparison.objective
    room = CHARACTERS_ACROSS // (1 if is_wide else 2) // len(scales)
    labels = [shortened_key(text, room) for text in (*(column.label for column in columns), label)]
    plot.axes.set_xticks(range(len(scales)), labels)
    plot.axes.set(xlim=(-0.3, len(scales) - 0.5), ylim=(-0.05, 1.05), yticks=[])
    plot.axes.spines[:].set_visible(False)
    plot.axes.grid(visible=False)
    handles, names = plot.axes.get_legend_handles_labels()
    by_name = dict(zip(names, handles, strict=True))
    plot.legend(list(by_name.values())[::-1], list(by_name)[::-1])
    left = len(differing) - len(columns)
    more = f"{left} more hyperparameter{'s are' if left > 1 else ' is'} not drawn." if left else ""
    return [plot.card("parallel", "Hyperparameters and objective", _sentences(seen.note, more))]


Scale = tuple[NDArray[np.float64], list[tuple[float, str]]]


def _scale(values: NDArray[np.float64], is_log: bool) -> Scale:
    """Return where numbers are on an axis from 0 to 1, and its ticks: all of them where they are few and apart."""
    places = np.log10(values) if is_log else values
    low, length = places.min(), np.ptp(places)
    if length == 0:
        return np.full(len(values), 0.5), [(0.5, f"{values[0]:.4g}")]
    ticks = np.unique(places)
    if len(ticks) > MAX_TICKS or np.diff(ticks).min() < TICK_DISTANCE * length:
        ticks = np.linspace(low, low + length, MAX_TICKS)
    texts = [f"{10**tick if is_log else tick:.3g}" for tick in ticks]
    return (places - low) / length, list(zip(((ticks - low) / length).tolist(), texts, strict=True))


def _names(column: Column) -> Scale:
    """Return the same for words."""
    place = {name: (index + 0.5) / len(column.names) for index, name in enumerate(column.names)}
    texts = [(height, shortened(shown(name), 16)) for name, height in place.items()]
    return np.array([place[NONE if text is None else text] for text in column.texts]), texts


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
