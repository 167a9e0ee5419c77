"""The figures of a sweep: hyperparameters against the objective, their importances, the objective of all."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator
from numpy.typing import NDArray

from mlotool.report.figure import SIZE_INCHES, WIDE_INCHES, Card, Sketchbook
from mlotool.report.formats import NONE, shortened, shortened_key
from mlotool.report.importance import importances
from mlotool.report.palette import light
from mlotool.report.sweep_columns import Column, shown
from mlotool.report.sweep_settings import Comparison, Setting
from mlotool.report.visible_range import VisibleRange, visible_range

MAX_AXES = 10
MAX_TICKS = 6
# Ticks nearer to each other than this share of the axis would be printed over one another.
TICK_DISTANCE = 0.055
# Characters that fit between the first and the last axis of a wide figure.
CHARACTERS_ACROSS = 118


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
    budget = (CHARACTERS_ACROSS if is_wide else CHARACTERS_ACROSS // 2) // (len(columns) + 1)
    scales = [*(_Scale.of(column, budget) for column in columns), _Scale.of_objective(comparison, values, seen, budget)]
    _draw_lines(axes, comparison, settings, np.stack([scale.heights for scale in scales], axis=1))
    _draw_scales(axes, scales)
    figure.legend(*_legend(comparison, settings), loc="outside lower left", ncols=4 if is_wide else 2)
    notes = [seen.note([each.jobs for each in settings], values, _whose(comparison))]
    left = len(differing) - len(columns)
    notes.append(f"{left} more hyperparameter{'s are' if left > 1 else ' is'} not drawn." if left else "")
    return [book.finish(figure, "parallel", "Hyperparameters and objective", " ".join(filter(None, notes)))]


def _whose(comparison: Comparison) -> str:
    return "the mean of jobs" if comparison.has_seeds else "job"


def _draw_lines(axes: Axes, comparison: Comparison, settings: Sequence[Setting], heights: NDArray[np.float64]) -> None:
    # The better a setting, the stronger its line, and the later it is drawn.
    sign = 1 if comparison.mode == "min" else -1
    worst_first = sorted(range(len(settings)), key=lambda index: -sign * (settings[index].drawn or 0.0))
    for rank, index in enumerate(worst_first):
        is_best = settings[index] is comparison.best
        axes.plot(
            np.arange(heights.shape[1]),
            heights[index],
            color=light("problem-1" if is_best else "problem-0" if settings[index].values else "muted"),
            alpha=1.0 if is_best else 0.2 + 0.6 * rank / len(settings),
            linewidth=2.2 if is_best else 1.1,
            linestyle="-" if settings[index].values else (0, (2, 2)),
            zorder=3 if is_best else 2,
        )


def _legend(comparison: Comparison, settings: Sequence[Setting]) -> tuple[list[Line2D], list[str]]:
    handles, labels = [], []
    best = comparison.best
    if best is not None:
        handles.append(Line2D([], [], color=light("problem-1"), linewidth=2.2))
        name = f"best setting: jobs {best.jobs}" if len(best.rows) > 1 else f"best: job {best.jobs}"
        labels.append(shortened(name, 40))
    if any(each.values for each in settings if each is not best):
        handles.append(Line2D([], [], color=light("problem-0")))
        labels.append("others, better ones stronger")
    rest = {row.status for each in settings if not each.values for row in each.rows if row.value is not None}
    if rest:
        handles.append(Line2D([], [], color=light("muted"), linestyle=(0, (2, 2))))
        labels.append(", ".join(sorted(rest)))
    return handles, labels


@dataclass(frozen=True)
class _Scale:
    """A vertical axis between 0 and 1."""

    label: str
    heights: NDArray[np.float64]
    ticks: list[tuple[float, str]]

    @classmethod
    def of(cls, column: Column, budget: int) -> "_Scale":
        numbers = column.numbers
        if numbers is None:
            names = column.names
            places = {name: (index + 0.5) / len(names) for index, name in enumerate(names)}
            heights = np.array([places[name] for name in (NONE if text is None else text for text in column.texts)])
            ticks = [(place, shortened(shown(name), max(6, budget - 4))) for name, place in places.items()]
            return cls(wrapped(column.label, budget), heights, _apart(ticks))
        span = VisibleRange(min(numbers), max(numbers), column.is_log, is_clipped=False)
        return cls.of_numbers(wrapped(column.label, budget), np.asarray(numbers), span)

    @classmethod
    def of_objective(cls, comparison: Comparison, values: Sequence[float], seen: VisibleRange, budget: int) -> "_Scale":
        label = f"{comparison.objective}, mean" if comparison.has_seeds else comparison.objective
        scale = cls.of_numbers(wrapped(label, budget), seen.clip(values), seen)
        if not seen.is_clipped:
            return scale
        ends = {0.0: "≤ ", 1.0: "≥ "}
        outside = {0.0 if value < seen.low else 1.0 for value in values if not seen.low <= value <= seen.high}
        ticks = [(at, f"{ends[at]}{text}" if at in outside else text) for at, text in scale.ticks]
        return cls(scale.label, scale.heights, ticks)

    @classmethod
    def of_numbers(cls, label: str, values: NDArray[np.float64], span: VisibleRange) -> "_Scale":
        if span.low == span.high:
            return cls(label, np.full(len(values), 0.5), [(0.5, f"{span.low:.4g}")])
        place = np.log10 if span.is_log else np.asarray
        low, high = float(place(span.low)), float(place(span.high))
        ticks = sorted(set(values.tolist()))
        if len(ticks) > MAX_TICKS:
            ticks = _round_numbers(span, whole=all(each.is_integer() for each in ticks))
        heights = np.clip(np.asarray((place(values) - low) / (high - low)), 0.0, 1.0)
        texts = [(float(place(each) - low) / (high - low), f"{each:.3g}") for each in ticks]
        return cls(label, heights, _apart(texts))


def _round_numbers(span: VisibleRange, *, whole: bool) -> list[float]:
    """Return both ends of an axis, and round numbers between them."""
    if span.is_log:
        locator: Locator = LogLocator(subs=(1, 2, 5) if span.high < 100 * span.low else (1,), numticks=8)
    else:
        locator = MaxNLocator(5, integer=whole)
    inside = [float(each) for each in locator.tick_values(span.low, span.high) if span.low < each < span.high]
    return [span.low, *inside, span.high]


def wrapped(label: str, width: int) -> str:
    """Return a dotted label in at most three lines of `width` characters, broken after dots, else after underscores."""
    lines, line = [], ""
    parts = (piece for part in _parts(label, "./ ") for piece in ([part] if len(part) <= width else _parts(part, "_")))
    for part in parts:
        if line and len(line) + len(part) > width:
            lines.append(line)
            line = ""
        line += part
    lines.append(line)
    if len(lines) > 3:
        lines = [f"…{lines[-3]}", *lines[-2:]]
    return "\n".join(shortened(each, max(6, width)) for each in lines)


def _parts(label: str, ends: str) -> list[str]:
    parts = [""]
    for character in label:
        parts[-1] += character
        if character in ends:
            parts.append("")
    return [part for part in parts if part]


def _apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the ticks, the ends and of the rest those that are not too near to the one before."""
    kept = ticks[:1]
    for tick in ticks[1:-1]:
        if tick[0] - kept[-1][0] >= TICK_DISTANCE and ticks[-1][0] - tick[0] >= TICK_DISTANCE:
            kept.append(tick)
    return [*kept, *ticks[-1:]] if len(ticks) > 1 else kept


def _draw_scales(axes: Axes, scales: Sequence[_Scale]) -> None:
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([])
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(-0.3, len(scales) - 0.55)
    axes.set_xticks(range(len(scales)), [scale.label for scale in scales])
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelsize=8, labelcolor=light("ink"))
    box = {"boxstyle": "round,pad=0.15", "facecolor": light("card"), "edgecolor": "none", "alpha": 0.85}
    for place, scale in enumerate(scales):
        axes.plot([place, place], [0, 1], color=light("muted"), linewidth=0.8, zorder=4)
        for height, text in scale.ticks:
            axes.plot([place - 0.012, place + 0.012], [height, height], color=light("muted"), linewidth=0.8, zorder=4)
            axes.text(place + 0.025, height, text, va="center", color=light("ink"), fontsize=7, bbox=box, zorder=5)


def importance_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw how much each hyperparameter matters for the settings' means; the seed is none of them."""
    done = [index for index, each in enumerate(comparison.settings) if each.values]
    taken = [column.take(done) for column in comparison.columns]
    columns = [column for column in taken if len(set(column.texts)) > 1]
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
    top = found[:10][::-1]
    axes.barh(range(len(top)), [value for _, value in top], color=light("problem-0"), height=0.6)
    axes.set_yticks(range(len(top)), [shortened_key(label, 26) for label, _ in top])
    axes.set_xlim(0, max(1.0, max(value for _, value in top) * 1.12))
    axes.grid(visible=False, axis="y")
    for place, (_, value) in enumerate(top):
        axes.text(value + 0.015, place, f"{value:.2f}", va="center", fontsize=7.5)
    over = "settings, each the mean of its jobs that finished" if comparison.has_seeds else "jobs that finished"
    clipped = "; values that crush the others are clipped" if seen.is_clipped else ""
    is_partial = any(None in column.texts for column in columns)
    partial = "; where a decision was not asked for, that counts as a value of it" if is_partial else ""
    note = f"{method[0].upper()}{method[1:]}, over the {len(done)} {over}{clipped}{partial}."
    return [book.finish(figure, "importance", "Importance of the hyperparameters", note)]
