"""The figures of layer-parallel training: timeline, speed-up, constraint violation."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mlotool.report.curves import Line, curve_card
from mlotool.report.figure import Card, Sketchbook, legend_above
from mlotool.report.formats import number
from mlotool.report.palette import light
from mlotool.report.parallel_records import Span, Timeline
from mlotool.report.residuals import RESIDUAL
from mlotool.report.series import Series

MAX_BATCHES = 3
WORK_COLOURS = {"forward": "problem-0", "backward": "problem-1", "auxnet": "problem-2", "communication": "right"}
OTHER_COLOUR = "problem-3"
VIOLATION = re.compile(r"(relative_)?violation_(\d+)")


def split_series(series: Iterable[Series]) -> tuple[list[Series], list[Series]]:
    """Return what is drawn here (violations, beta beside them, residuals), and all else."""
    every = list(series)
    owners = {each.owner for each in every if VIOLATION.fullmatch(each.metric)}

    def is_ours(each: Series) -> bool:
        is_known = VIOLATION.fullmatch(each.metric) or RESIDUAL.fullmatch(each.metric)
        return bool(is_known) or (each.metric == "beta" and each.owner in owners)

    return [each for each in every if is_ours(each)], [each for each in every if not is_ours(each)]


def timeline_card(book: Sketchbook, timeline: Timeline) -> Card:
    """Draw what each rank did when, in a few batches."""
    batches = timeline.batches[:MAX_BATCHES]
    spans = [span for span in timeline.spans if span.batch in batches]
    start = min(span.begin for span in spans)
    figure, axes = book.new((8.9, 1.35 + 0.42 * min(timeline.num_stages, 24)))
    for span in spans:
        _draw_span(axes, span, start)
    axes.set_ylim(timeline.num_stages - 0.45, -0.55)
    axes.set_yticks(range(timeline.num_stages), [f"rank {rank}" for rank in range(timeline.num_stages)])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds")
    kinds = sorted({span.what for span in spans}, key=lambda what: [*WORK_COLOURS, what].index(what))
    legend_above(axes, [Patch(color=light(WORK_COLOURS.get(what, OTHER_COLOUR))) for what in kinds], kinds)
    recorded = len({span.batch for span in timeline.spans})
    note = f"Batches {batches[0]} to {batches[-1]} of the first {recorded}; numbers are those of the batches."
    title = f"{timeline.problem}: what each rank did when"
    return book.finish(figure, f"timeline-{timeline.problem}", title, note)


def speedup_card(book: Sketchbook, timeline: Timeline) -> Card:
    """Draw the speed-up that the spans show beside the one that equation 27 makes of their parts."""
    seconds = timeline.seconds
    rows = {
        f"{timeline.num_stages} ranks, nothing added": (float(timeline.num_stages), "right"),
        "equation 27": (timeline.predicted, "problem-1"),
        "measured": (timeline.measured, "problem-0"),
    }
    figure, axes = book.new()
    box = {"boxstyle": "square,pad=0.1", "facecolor": light("card"), "edgecolor": "none"}
    values = [value for value, _ in rows.values()]
    axes.barh(list(rows), values, color=[light(colour) for _, colour in rows.values()], height=0.6)
    for place, value in enumerate(values):
        axes.text(value + 0.02 * max(values), place, f"{value:.2f}", va="center", fontsize=7.5, bbox=box)
    axes.axvline(1.0, color=light("muted"), linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)
    axes.set_xlim(0, 1.12 * max(values))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("times as fast as all stages one after the other")
    parts = {"forward": seconds.forward, "backward": seconds.backward, "auxiliary": seconds.auxiliary}
    note = "A batch, all stages together: " + ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in parts.items())
    note += " on the busiest rank. Loading and the optimizer's step are in neither."
    if not timeline.is_simultaneous:
        note += " The stages ran one after the other, in one process: there is no speed-up to see."
    return book.finish(figure, f"speedup-{timeline.problem}", f"{timeline.problem}: speed-up", note)


def violation_cards(book: Sketchbook, series: Sequence[Series]) -> list[Card]:
    """Draw how far each interface's variable is from where the stage before it ends; and beta, where it changes.

    Args:
        book: takes the figures.
        series: the first part of `split_series`.
    """
    cards = []
    for owner in dict.fromkeys(each.owner for each in series if VIOLATION.fullmatch(each.metric)):
        own = [each for each in series if each.owner == owner]
        beta = [each for each in own if each.metric == "beta" and len(each.finite)]
        # Of a coefficient that stays the same a line says enough.
        changing = [each for each in beta if np.ptp(each.finite) > 0]
        constant = "".join(f"beta = {number(float(each.finite[0]))}." for each in beta if each not in changing)
        for prefix, words in (("", "constraint violation"), ("relative_", "relative constraint violation")):
            group = [each for each in own if re.fullmatch(rf"{prefix}violation_\d+", each.metric)]
            if group:
                card = _interfaces(book, f"{owner}: {words}", group)
                cards.append(replace(card, note=" ".join(part for part in (constant, card.note) if part)))
        for each in changing:
            line = Line(OTHER_COLOUR, "-", "o", "beta")
            cards.append(curve_card(book, f"beta-{owner}", f"{owner}: penalty coefficient beta", [each], [line]))
    return cards


def _draw_span(axes: Axes, span: Span, start: float) -> None:
    begin, length = 1e3 * (span.begin - start), 1e3 * (span.end - span.begin)
    colour = light(WORK_COLOURS.get(span.what, OTHER_COLOUR))
    axes.barh(span.rank, length, left=begin, height=0.62, color=colour, edgecolor=light("card"), linewidth=0.4)
    if span.what == "forward":
        middle = begin + length / 2
        axes.text(middle, span.rank, str(span.batch), color=light("card"), ha="center", va="center", fontsize=6.5)


def _interfaces(book: Sketchbook, title: str, group: Iterable[Series]) -> Card:
    found = sorted(group, key=lambda each: int(each.metric.rpartition("_")[2]))
    lines = [
        Line(f"problem-{place % 8}", "-", "o", f"interface {each.metric.rpartition('_')[2]}")
        for place, each in enumerate(found)
    ]
    return curve_card(book, title.replace(": ", "-"), title, found, lines)
