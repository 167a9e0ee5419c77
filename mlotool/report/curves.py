"""The curves: a card for each problem's loss, each other training metric, and each evaluated metric."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from mlotool.report.figure import Card, Sketchbook, legend_above, use_log_scale, whole_ticks
from mlotool.report.formats import number, words
from mlotool.report.palette import light
from mlotool.report.series import LARGEST, Series, needs_log_scale, smoothed, thinned

# Splits share the evaluated problem's colour and differ in line and marker.
SPLIT_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))

MAX_NAMED = 20
"""Curves of one card with a legend."""

# Set by a schedule: a moving mean would show values that were never used.
SCHEDULED = ("lr", "beta")

TITLES = {"lr": "Learning rate", "hypergradient_norm": "Norm of the hypergradient"}

# Begins the keys of an upper problem's values, as the runner logs them.
LEARNED = "learned_"


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its tick, and the key that chose it with its value there."""

    tick: int | None
    key: str
    value: float | None


def training_cards(book: Sketchbook, series: Sequence[Series], colours: dict[str, str]) -> list[Card]:
    """Draw what the problems logged while they trained; losses first, the learning rate last.

    Not rates that stay what they are, which `constant_rates` tells. Not the number of steps: it is a straight line,
    and the table of last values has it.
    """
    own = [each for each in series if each.owner in colours]
    cards = []
    for each in sorted((s for s in own if s.metric == "loss"), key=lambda s: list(colours).index(s.owner)):
        title = f"{each.owner}: training loss"
        cards.append(curve_card(book, f"loss-{each.owner}", title, [each], [_line(each, colours[each.owner])]))
    metrics = dict.fromkeys(each.metric for each in own if each.metric not in ("loss", "lr", "step"))
    for metric in (*metrics, "lr"):
        group = [each for each in own if each.metric == metric and not _is_constant_rate(each)]
        if group:
            title = TITLES.get(metric, f"Training: {words(metric)}")
            lines = [_line(each, colours[each.owner]) for each in group]
            cards.append(curve_card(book, f"training-{metric}", title, group, lines))
    return cards


def constant_rates(series: Sequence[Series], colours: Mapping[str, str]) -> str:
    """Return a sentence of the learning rates that stay what they are; empty where there are none."""
    own = [each for each in series if each.owner in colours and _is_constant_rate(each)]
    rates = ", ".join(f"{each.owner} {number(float(each.finite[0]))}" for each in own)
    return f"Constant learning rate{'s' if len(own) > 1 else ''}: {rates}." if own else ""


def _is_constant_rate(series: Series) -> bool:
    values = series.finite
    return series.metric == "lr" and len(values) == len(series.values) > 0 and bool((values == values[0]).all())


def evaluation_cards(
    book: Sketchbook, series: Sequence[Series], splits: Iterable[str], colour: str, best: Best
) -> list[Card]:
    """Draw what was evaluated on each split, with the best checkpoint marked."""
    order = list(splits)
    own = [each for each in series if each.owner in order]
    cards = []
    for metric in dict.fromkeys(each.metric for each in own):
        group = sorted((each for each in own if each.metric == metric), key=lambda each: order.index(each.owner))
        lines = []
        for each in group:
            style, marker = SPLIT_STYLES[order.index(each.owner) % len(SPLIT_STYLES)]
            lines.append(Line(colour, style, marker, each.owner))
        cards.append(curve_card(book, f"evaluation-{metric}", f"Evaluation: {words(metric)}", group, lines, best))
    return cards


@dataclass(frozen=True)
class Line:
    """How a series is drawn: the name of its colour, line, marker, and what the legend says."""

    colour: str
    style: str
    marker: str
    label: str


def _line(series: Series, colour: str) -> Line:
    return Line(colour, "-", "o", series.owner)


def curve_card(
    book: Sketchbook,
    slug: str,
    title: str,
    group: Sequence[Series],
    lines: Sequence[Line],
    best: Best | None = None,
    num_named: int = MAX_NAMED,
) -> Card:
    """Draw series over ticks in one figure, on a log scale where they span decades; of too many none is named."""
    figure, axes = book.new()
    values = np.concatenate([each.finite for each in group])
    handles = [_draw(axes, each, line) for each, line in zip(group, lines, strict=True)]
    labels = [line.label for line in lines]
    if best is not None and best.tick is not None and len(values):
        mark, text, star = _mark_best(axes, group, lines, best)
        handles, labels = [*handles, mark], [*labels, text]
        values = np.append(values, star)
    _scale(axes, values)
    for each in group:
        _mark_not_finite(axes, each)
    whole_ticks(axes)
    # All panels of a page begin where the run does.
    axes.set_xlim(left=min(0.0, *(float(each.ticks[0]) for each in group)))
    if 1 < len(group) <= num_named or best is not None:
        legend_above(axes, handles, labels)
    return book.finish(figure, slug, title, _note(group, best))


def _scale(axes: Axes, values: NDArray[np.float64]) -> None:
    if not len(values):
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=light("muted"))
    elif needs_log_scale(values):
        use_log_scale(axes, "y")
    elif values.min() == values.max():
        # A constant needs room around it; matplotlib's own margin would label it to the last digit.
        room = abs(values[0]) * 0.5 or 1.0
        axes.set_ylim(values[0] - room, values[0] + room)


def _draw(axes: Axes, series: Series, line: Line) -> Line2D:
    colour = light(line.colour)
    smooth = smoothed(series.values)
    is_exact = series.metric in SCHEDULED or series.metric.startswith(LEARNED)
    if smooth is not None and not is_exact and _is_noisy(series.values, smooth):
        axes.plot(*thinned(series.ticks, series.values), color=colour, linewidth=0.7, alpha=0.5)
        return axes.plot(*thinned(series.ticks, smooth), color=colour, linewidth=1.6, linestyle=line.style)[0]
    marker = (line.marker if len(series.ticks) <= 30 else None) or ("o" if len(series.ticks) == 1 else None)
    return axes.plot(
        *thinned(series.ticks, series.values),
        color=colour,
        linewidth=1.4,
        linestyle=line.style,
        marker=marker,
        markersize=3 if len(series.ticks) > 1 else 5,
    )[0]


def _is_noisy(values: NDArray[np.float64], smooth: NDArray[np.float64]) -> bool:
    """Return whether a smoothed curve would tell the eye anything that the raw one does not."""
    rest = (values - smooth)[~np.isnan(values)]
    known = values[~np.isnan(values)]
    return len(known) > 0 and float(np.std(rest)) > 0.005 * float(np.ptp(known))


def _mark_best(
    axes: Axes, group: Sequence[Series], lines: Sequence[Line], best: Best
) -> tuple[Line2D, str, list[float]]:
    """Mark the best checkpoint's tick, and its value where this is the objective.

    Returns:
        what the legend shows and says, and the value that was marked: it may lie outside the curve, where metrics.csv
        was cut.
    """
    rule = axes.axvline(float(best.tick or 0), color=light("muted"), linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    for each, line in zip(group, lines, strict=True):
        if f"{each.owner}/{each.metric}" != best.key:
            continue
        at = each.values[each.ticks == best.tick]
        value = float(at[-1]) if len(at) else best.value
        if value is not None and abs(value) < LARGEST:
            style = {"marker": "*", "markersize": 9, "linestyle": "none", "clip_on": False, "zorder": 5}
            star = axes.plot([best.tick], [value], color=light(line.colour), **style)[0]  # type: ignore[arg-type]
            return star, f"best {number(value)} at {best.tick}", [value]
    return rule, f"best checkpoint, {best.tick}", []


def _mark_not_finite(axes: Axes, series: Series) -> None:
    for tick in series.not_finite[:1]:
        mark = axes.plot([tick], [0.0], "x", transform=axes.get_xaxis_transform(), color=light("failed"), markersize=5)
        mark[0].set_clip_on(False)


def _note(group: Sequence[Series], best: Best | None = None) -> str:
    notes = []
    for each in group:
        gaps = each.not_finite
        if len(gaps):
            values = "value was" if len(gaps) == 1 else "values were"
            notes.append(
                f"{each.owner}: {len(gaps)} {values} not finite, first at tick {number(float(gaps[0]))} (cross)."
            )
        if len(each.ticks) == 1 and len(each.finite):
            tick = number(float(each.ticks[0]))
            is_best = best is not None and best.tick == each.ticks[0]
            place = f"at the best checkpoint (tick {tick})" if is_best else f"at tick {tick}"
            notes.append(f"{each.owner}: {number(float(each.values[0]))} {place}.")
    return " ".join(notes)
