"""Layer-parallel training: who did what when, how much faster that was, and its constraints and cycles."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from mlotool.core.run_files import read_json
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup
from mlotool.report.figure import DASHES, NUM_PROBLEM_COLOURS, Card, Sketchbook, light
from mlotool.report.formats import number
from mlotool.report.run_figures import Line, curve_card
from mlotool.report.run_folder import Series, read_artifacts

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


def read_timelines(run_dir: Path) -> tuple[list[Timeline], list[str]]:
    """Read every artifacts/parallel_<problem>.json of a run folder.

    Returns:
        the timelines, and a note for each file that cannot be drawn.
    """

    def read(name: str) -> Timeline | None:
        prefix, _, problem = Path(name).stem.partition(PREFIX)
        if prefix or not problem:
            return None
        content: Any = read_json(run_dir, name, MAX_BYTES)
        num_stages, spans = content["stages"], content["spans"][:MAX_SPANS]
        return Timeline(problem, num_stages, spans, content.get("processes", num_stages) > 1)

    return read_artifacts(run_dir, ".json", MAX_FILES, read)


MAX_BATCHES = 3
WORK_COLOURS = {"forward": "problem-0", "backward": "problem-1", "auxnet": "problem-2", "communication": "right"}
OTHER_COLOUR = "problem-3"
# The part's name, where a module has several; then which solve, and after how many cycles.
RESIDUAL = re.compile(r"(?:(.+)\.)?(forward|backward)_residual_(\d+)")
VIOLATION = re.compile(r"(relative_)?violation_(\d+)")


def split_series(series: Iterable[Series]) -> tuple[list[Series], list[Series]]:
    """Return what is drawn here (violations, beta beside them, residuals), and all else."""
    ours, others, every = list[Series](), list[Series](), list(series)
    owners = {one.owner for one in every if VIOLATION.fullmatch(one.metric)}
    for one in every:
        is_known = VIOLATION.fullmatch(one.metric) or RESIDUAL.fullmatch(one.metric)
        (ours if is_known or (one.metric == "beta" and one.owner in owners) else others).append(one)
    return ours, others


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
    note = f"Batches {batches[0]} to {batches[-1]} of the first {recorded}; numbers are those of the batches."
    return plot.card(f"timeline-{timeline.problem}", f"{timeline.problem}: what each rank did when", note)


def speedup_card(book: Sketchbook, timeline: Timeline) -> Card:
    """Draw the speed-up that the spans show beside the one that equation 27 makes of their parts."""
    seconds = timeline.seconds
    rows = {
        f"{timeline.num_stages} ranks, nothing added": (float(timeline.num_stages), "right"),
        "equation 27": (timeline.predicted, "problem-1"),
        "measured": (timeline.measured, "problem-0"),
    }
    plot = book.new()
    plot.bars(rows, 1.12 * max(value for value, _ in rows.values()))
    plot.axes.axvline(1.0, color=light("muted"), linewidth=0.8, linestyle=DASHES, zorder=0.5)
    plot.label("times as fast as all stages one after the other")
    parts = {"forward": seconds.forward, "backward": seconds.backward, "auxiliary": seconds.auxiliary}
    note = "A batch, all stages together: " + ", ".join(f"{name} {1e3 * one:.3g} ms" for name, one in parts.items())
    note += " on the busiest rank. Loading and the optimizer's step are in neither."
    if not timeline.is_simultaneous:
        note += " The stages ran one after the other, in one process: there is no speed-up to see."
    return plot.card(f"speedup-{timeline.problem}", f"{timeline.problem}: speed-up", note)


def violation_cards(book: Sketchbook, series: Sequence[Series]) -> list[Card]:
    """Draw how far each interface's variable is from where the stage before it ends; and beta, where it changes.

    Args:
        book: takes the figures.
        series: the first part of `split_series`.
    """
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        if match := VIOLATION.fullmatch(one.metric):
            groups.setdefault((one.owner, f"{match[1] or ''}constraint violation".replace("_", " ")), []).append(one)
    betas = {one.owner: one for one in series if one.metric == "beta" and len(one.finite)}
    cards = []
    for (owner, words), group in groups.items():
        group.sort(key=lambda one: int(one.metric.rpartition("_")[2]))
        names = [f"interface {one.metric.rpartition('_')[2]}" for one in group]
        lines = [Line(f"problem-{place % NUM_PROBLEM_COLOURS}", name) for place, name in enumerate(names)]
        card = curve_card(book, f"{owner}-{words}", f"{owner}: {words}", group, lines)
        # Of a coefficient that stays the same a line says enough.
        if owner in betas and np.ptp(betas[owner].finite) == 0:
            card = replace(card, note=f"beta = {number(float(betas[owner].finite[0]))}. {card.note}".strip())
        cards.append(card)
    for owner, beta in betas.items():
        if np.ptp(beta.finite) > 0:
            title = f"{owner}: penalty coefficient beta"
            cards.append(curve_card(book, f"beta-{owner}", title, [beta], [Line(OTHER_COLOUR, "beta")]))
    return cards


KINDS = (("forward", "states", "problem-0", "o"), ("backward", "adjoints", "problem-1", "s"))
MAX_HISTORIES = 40


def residual_cards(book: Sketchbook, series: Sequence[Series]) -> list[Card]:
    """Draw the residuals of each problem's layers, part by part.

    Args:
        book: takes the figures.
        series: those of other keys are left out.
    """
    groups: dict[str, dict[str, dict[int, Series]]] = {}
    for one in series:
        if match := RESIDUAL.fullmatch(one.metric):
            part, kind, cycle = match.groups()
            name = f"{one.owner}, {part}" if part else one.owner
            groups.setdefault(name, {}).setdefault(kind, {})[int(cycle)] = one
    cards = []
    for name, by_kind in groups.items():
        plot = book.new()
        handles, lines, last, lowest = [], [], [], np.inf
        for kind, label, colour, marker in (known for known in KINDS if known[0] in by_kind):
            histories = _histories(by_kind[kind])
            style: dict[str, Any] = {"color": light(colour), "marker": marker, "markersize": 2.5, "linewidth": 0.9}
            for place, history in enumerate(histories, 1):
                plot.axes.plot(np.arange(len(history)), history, alpha=0.15 + 0.85 * place / len(histories), **style)
            lowest = min(lowest, np.nanmin(histories, initial=np.inf))
            handles.append(Line2D([], [], color=light(colour), marker=marker, markersize=3))
            lines.append(Line(colour, label, "-", marker))
            last.append(by_kind[kind][max(by_kind[kind])])
        if 0 < lowest < np.inf:
            plot.use_log_scale()
        plot.label("cycle", "norm of the residual", is_whole=True)
        plot.legend(handles, [line.label for line in lines])
        note = "One line a logged tick; the later, the stronger."
        cards.append(plot.card(f"residuals-{name}", f"{name}: residuals of multigrid", note))
        title = f"{name}: residual after the last cycle"
        cards.append(curve_card(book, f"last-residual-{name}", title, last, lines))
    return cards


def _histories(by_cycle: Mapping[int, Series]) -> NDArray[np.float64]:
    """Return the residuals by tick and cycle, NaN where there is none above 0, of at most MAX_HISTORIES ticks."""
    ticks = np.unique(np.concatenate([one.ticks for one in by_cycle.values()]))
    histories = np.full((len(ticks), 1 + max(by_cycle)), np.nan)
    for cycle, one in by_cycle.items():
        histories[np.searchsorted(ticks, one.ticks), cycle] = np.where(one.values > 0, one.values, np.nan)
    # Evenly spread, the last one among them.
    num = min(len(ticks), MAX_HISTORIES)
    return histories[np.linspace(0, len(ticks) - 1, num).round().astype(int)]
