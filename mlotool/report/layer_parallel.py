"""Layer-parallel training: who did what when, how much faster that was, its constraints and its residuals."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
from matplotlib.patches import Patch
from pydantic import Field
from pydantic.dataclasses import dataclass

from mlotool.folders.run_folder import RunFolder
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup
from mlotool.report.figure import DASHES, NUM_PROBLEM_COLOURS, Card, Sketchbook, light
from mlotool.report.recorded_run import Series, read_artifacts
from mlotool.report.run_figures import Line, curve_card

MAX_SPANS, MAX_STAGES, MAX_SECONDS = 20_000, 256, 1e9
MAX_FILES, MAX_BYTES = 100, 20_000_000
PREFIX = "parallel_"


Time = Annotated[float, Field(gt=-MAX_SECONDS, lt=MAX_SECONDS)]


@dataclass(frozen=True)
class Span:
    """One piece of work.

    Args:
        rank: of the stage that did it.
        batch: counted from 0.
        what: forward, backward, auxnet, communication, or a word of another kind of work.
        begin: seconds.
        end: seconds.
    """

    rank: Annotated[int, Field(ge=0)]
    batch: int
    what: str
    begin: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The first batches of a problem whose stages run on ranks of their own.

    Args:
        problem: its name.
        num_stages: K.
        spans: of all ranks; at least one.
        is_simultaneous: whether the stages are processes of their own; if not they work one after the other.

    Raises:
        ValueError: a span is of another rank or ends before it begins, or no pass takes any time.
    """

    problem: str
    num_stages: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    spans: tuple[Span, ...]
    is_simultaneous: bool = True

    def __post_init__(self) -> None:
        if not self.spans or not all(span.rank < self.num_stages and span.begin <= span.end for span in self.spans):
            raise ValueError(f"expected spans of ranks 0 to {self.num_stages - 1}, each ending after it begins")
        if not self.seconds.serial > 0:
            raise ValueError("expected forward and backward passes that take some time")

    @cached_property
    def batches(self) -> list[int]:
        """The recorded batches but the first one, which builds what the others find; all where there is no other."""
        batches = sorted({span.batch for span in self.spans})
        return batches[1:] or batches

    @cached_property
    def seconds(self) -> BatchSeconds:
        """The parts of a batch: the passes of all stages together, and what the busiest rank does for the method."""
        totals: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        for span in self.spans:
            totals[span.what, span.rank, span.batch] += span.end - span.begin
        ranks = range(self.num_stages)
        forward, backward, auxiliary = (
            [median(totals[what, rank, batch] for batch in self.batches) for rank in ranks]
            for what in ("forward", "backward", "auxnet")
        )
        return BatchSeconds(sum(forward), sum(backward), auxiliary=max(auxiliary))

    @property
    def measured(self) -> float:
        """The passes of all stages, one after the other, over what a batch took from first to last span of a rank."""
        times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for span in self.spans:
            times[span.batch, span.rank] += [span.begin, span.end]
        longest = dict.fromkeys(self.batches, 0.0)
        for (batch, _), ends in times.items():
            longest[batch] = max(longest.get(batch, 0.0), max(ends) - min(ends))
        return self.seconds.serial / median(longest[batch] for batch in self.batches)

    @property
    def predicted(self) -> float:
        """What equation 27 says of the same parts."""
        return predicted_speedup(self.seconds, self.num_stages)


def read_timelines(folder: RunFolder) -> tuple[list[Timeline], list[str]]:
    """Read every artifacts/parallel_<problem>.json of a run folder.

    Returns:
        the timelines, and a note for each file that cannot be drawn.
    """

    def read(name: str) -> Timeline | None:
        prefix, _, problem = Path(name).stem.partition(PREFIX)
        if prefix or not problem:
            return None
        content: Any = folder.json(name, MAX_BYTES)
        num_stages, spans = content["stages"], content["spans"][:MAX_SPANS]
        return Timeline(problem, num_stages, spans, content.get("processes", num_stages) > 1)

    return read_artifacts(folder, ".json", MAX_FILES, read)


MAX_BATCHES = 3
WORK_COLOURS = {"forward": "problem-0", "backward": "problem-1", "auxnet": "problem-2", "communication": "right"}
OTHER_COLOUR = "problem-3"
# Metrics that are one of a row: the part's name, where a module has several, what is measured, and a number.
_NUMBERED = re.compile(r"(?:(.+)\.)?((?:relative_)?violation|(?:forward|backward)_residual)_(\d+)")
# What the title of such a figure says, and what a number counts.
_MEANINGS = {
    "violation": ("constraint violation", "interface"),
    "relative_violation": ("relative constraint violation", "interface"),
    "forward_residual": ("residual of multigrid, states", "cycle"),
    "backward_residual": ("residual of multigrid, adjoints", "cycle"),
}


def split_series(series: Iterable[Series]) -> tuple[list[Series], list[Series]]:
    """Return what is drawn here (violations and residuals), and all else."""
    ours, others = list[Series](), list[Series]()
    for curve in series:
        (ours if _NUMBERED.fullmatch(curve.metric) else others).append(curve)
    return ours, others


def numbered_cards(book: Sketchbook, series: Iterable[Series]) -> list[Card]:
    """Draw violations of the constraints and residuals: a figure for each problem or part, with a line a number.

    Args:
        book: takes the figures.
        series: the first part of `split_series`.
    """
    groups: dict[tuple[str, str], dict[int, Series]] = {}
    for curve in series:
        if match := _NUMBERED.fullmatch(curve.metric):
            part, kind, number = match.groups()
            groups.setdefault((f"{curve.owner}, {part}" if part else curve.owner, kind), {})[int(number)] = curve
    cards = []
    for (name, kind), by_number in groups.items():
        words, counted = _MEANINGS[kind]
        numbers = sorted(by_number)
        lines = [Line(f"problem-{number % NUM_PROBLEM_COLOURS}", f"{counted} {number}") for number in numbers]
        group = [by_number[number] for number in numbers]
        cards.append(curve_card(book, f"{name}-{kind}", f"{name}: {words}", group, lines))
        if counted == "cycle":
            cards.append(cycle_card(book, f"{name}-{kind}-by-cycle", f"{name}: {words}, by cycle", by_number))
    return cards


# Ticks that a figure of residuals by cycle has a line of.
MAX_HISTORIES = 40


def cycle_card(book: Sketchbook, slug: str, title: str, by_cycle: Mapping[int, Series]) -> Card:
    """Draw how the residual falls from cycle to cycle, a line a logged tick."""
    plot = book.new()
    ticks = np.unique(np.concatenate([curve.ticks for curve in by_cycle.values()]))
    # Evenly spread, the last one among them.
    ticks = ticks[np.linspace(0, len(ticks) - 1, min(len(ticks), MAX_HISTORIES)).round().astype(int)]
    for place, tick in enumerate(ticks, 1):
        at = {cycle: curve.values[curve.ticks == tick] for cycle, curve in sorted(by_cycle.items())}
        known = {cycle: values[0] for cycle, values in at.items() if (values > 0).any()}
        style: dict[str, Any] = {"color": light("problem-0"), "marker": "o", "markersize": 2.5, "linewidth": 0.9}
        plot.axes.plot(list(known), list(known.values()), alpha=0.15 + 0.85 * place / len(ticks), **style)
    if any((curve.values > 0).any() for curve in by_cycle.values()):
        plot.use_log_scale()
    plot.label("cycle", "norm of the residual", is_whole=True)
    return plot.card(slug, title, "One line a logged tick; the later, the stronger.")


def timeline_card(book: Sketchbook, timeline: Timeline) -> Card:
    """Draw what each rank did when, in a few batches."""
    batches = timeline.batches[:MAX_BATCHES]
    spans = [span for span in timeline.spans if span.batch in batches]
    start = min(span.begin for span in spans)
    plot = book.new((8.9, 1.35 + 0.42 * min(timeline.num_stages, 24)))
    text: dict[str, Any] = {"color": light("card"), "ha": "center", "va": "center", "fontsize": 6.5}
    edge: dict[str, Any] = {"height": 0.62, "edgecolor": light("card"), "linewidth": 0.4}
    for span in spans:
        begin, length = 1e3 * (span.begin - start), 1e3 * (span.end - span.begin)
        colour = light(WORK_COLOURS.get(span.what, OTHER_COLOUR))
        plot.axes.barh(span.rank, length, left=begin, color=colour, **edge)
        if span.what == "forward":
            plot.axes.text(begin + length / 2, span.rank, str(span.batch), **text)
    plot.axes.set_ylim(timeline.num_stages - 0.45, -0.55)
    plot.axes.set_yticks(range(timeline.num_stages), [f"rank {rank}" for rank in range(timeline.num_stages)])
    plot.axes.tick_params(axis="y", length=0)
    plot.axes.grid(visible=False, axis="y")
    plot.label("milliseconds")
    kinds = sorted({span.what for span in spans}, key=lambda what: [*WORK_COLOURS, what].index(what))
    plot.legend([Patch(color=light(WORK_COLOURS.get(what, OTHER_COLOUR))) for what in kinds], kinds)
    recorded = len({span.batch for span in timeline.spans})
    note = f"Batches {batches[0]} to {batches[-1]} of the first {recorded}; the numbers are batch numbers."
    return plot.card(f"timeline-{timeline.problem}", f"{timeline.problem}: what each rank did when", note)


def speedup_card(book: Sketchbook, timeline: Timeline) -> Card:
    """Draw the speed-up that the spans show beside the one that equation 27 makes of their parts."""
    ideal, num_stages = f"{timeline.num_stages} ranks, no overhead", float(timeline.num_stages)
    rows = {ideal: num_stages, "equation 27": timeline.predicted, "measured": timeline.measured}
    plot = book.new(left=1.45)
    colours = [light(name) for name in ("right", "problem-1", "problem-0")]
    bars = plot.axes.barh(list(rows), list(rows.values()), color=colours, height=0.6)
    plot.axes.bar_label(bars, fmt="%.2f", padding=3)
    plot.axes.axvline(1.0, color=light("muted"), linewidth=0.8, linestyle=DASHES, zorder=0.5)
    plot.axes.set_xlim(0, 1.12 * max(rows.values()))
    plot.axes.grid(visible=False, axis="y")
    plot.label("times as fast as all stages one after the other")
    seconds = timeline.seconds
    parts = {"forward": seconds.forward, "backward": seconds.backward, "auxiliary": seconds.auxiliary}
    note = "A batch, all stages together: " + ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in parts.items())
    note += " on the busiest rank. Loading and the optimizer's step are not included."
    if not timeline.is_simultaneous:
        note += " The stages ran one after the other, in one process: there is no speed-up to see."
    return plot.card(f"speedup-{timeline.problem}", f"{timeline.problem}: speed-up", note)
