"""Layer-parallel training: who did what when, how much faster that was, and its constraints and cycles."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from mlotool.core.run_files import read_json
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup
from mlotool.report.figure import (
    DASHES,
    NUM_PROBLEM_COLOURS,
    Card,
    Sketchbook,
    bars,
    legend_above,
    light,
    use_log_scale,
    whole_numbers,
)
from mlotool.report.formats import number
from mlotool.report.run_figures import Line, curve_card
from mlotool.report.run_folder import Series, read_artifacts

MAX_SPANS, MAX_STAGES, MAX_SECONDS = 20_000, 256, 1e9
MAX_FILES, MAX_BYTES = 100, 20_000_000
PREFIX = "parallel_"


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

    rank: int
    batch: int
    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The first batches of a problem whose stages run on ranks of their own.

    Args:
        problem: its name.
        num_stages: K.
        spans: of all ranks; at least one.
        is_simultaneous: whether the stages are processes of their own; if not they work one after the other.
    """

    problem: str
    num_stages: int
    spans: tuple[Span, ...]
    is_simultaneous: bool = True

    @cached_property
    def batches(self) -> list[int]:
        """The recorded batches but the first one, which builds what the others find; all where there is no other."""
        found = sorted({span.batch for span in self.spans})
        return found[1:] or found

    @cached_property
    def seconds(self) -> BatchSeconds:
        """The parts of a batch: the passes of all stages together, and what the busiest rank does for the method."""
        auxiliary = max(self._of_rank("auxnet", rank) for rank in range(self.num_stages))
        forward, backward = (
            sum(self._of_rank(what, rank) for rank in range(self.num_stages)) for what in ("forward", "backward")
        )
        return BatchSeconds(forward, backward, auxiliary=auxiliary)

    @property
    def measured(self) -> float:
        """The passes of all stages, one after the other, over what a batch took from first to last span of a rank."""
        return self.seconds.serial / median(self._longest[batch] for batch in self.batches)

    @property
    def predicted(self) -> float:
        """What equation 27 says of the same parts."""
        return predicted_speedup(self.seconds, self.num_stages)

    def _of_rank(self, what: str, rank: int) -> float:
        """Return the median over batches."""
        return median(self._totals.get((what, rank, batch), 0.0) for batch in self.batches)

    @cached_property
    def _totals(self) -> dict[tuple[str, int, int], float]:
        """Seconds by kind of work, rank and batch."""
        found: dict[tuple[str, int, int], float] = {}
        for span in self.spans:
            key = span.what, span.rank, span.batch
            found[key] = found.get(key, 0.0) + span.end - span.begin
        return found

    @cached_property
    def _longest(self) -> dict[int, float]:
        """By batch, the seconds from the first to the last span of the rank where that is most."""
        ends: dict[tuple[int, int], tuple[float, float]] = {}
        for span in self.spans:
            begin, end = ends.get((span.batch, span.rank), (span.begin, span.end))
            ends[span.batch, span.rank] = min(begin, span.begin), max(end, span.end)
        found: dict[int, float] = {}
        for (batch, _), (begin, end) in ends.items():
            found[batch] = max(found.get(batch, 0.0), end - begin)
        return found


def read_timelines(run_dir: Path) -> tuple[list[Timeline], list[str]]:
    """Read every artifacts/parallel_<problem>.json of a run folder.

    Returns:
        the timelines, and a note for each file that cannot be drawn.
    """

    def read(name: str) -> Timeline | None:
        stem = Path(name).stem
        if not stem.startswith(PREFIX):
            return None
        return _timeline(stem.removeprefix(PREFIX), read_json(run_dir, name, MAX_BYTES))

    return read_artifacts(run_dir, ".json", MAX_FILES, read)


def _timeline(problem: str, content: Any) -> Timeline:
    spans = tuple(
        Span(int(each["rank"]), int(each["batch"]), str(each["what"]), float(each["begin"]), float(each["end"]))
        for each in content["spans"][:MAX_SPANS]
    )
    num_stages = int(content["stages"])
    good = [0 <= span.rank < num_stages and -MAX_SECONDS < span.begin <= span.end < MAX_SECONDS for span in spans]
    if not 1 <= num_stages <= MAX_STAGES or not spans or not all(good):
        raise ValueError(f"expected spans of ranks 0 to {num_stages - 1}, each ending after it begins")
    found = Timeline(problem, num_stages, spans, int(content.get("processes", num_stages)) > 1)
    if not found.seconds.serial > 0:
        raise ValueError("expected forward and backward passes that take some time")
    return found


MAX_BATCHES = 3
WORK_COLOURS = {"forward": "problem-0", "backward": "problem-1", "auxnet": "problem-2", "communication": "right"}
OTHER_COLOUR = "problem-3"
# The part's name, where a module has several; then which solve, and after how many cycles.
RESIDUAL = re.compile(r"(?:(.+)\.)?(forward|backward)_residual_(\d+)")
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
    values = [value for value, _ in rows.values()]
    bars(axes, list(rows), values, [colour for _, colour in rows.values()], 1.12 * max(values))
    axes.axvline(1.0, color=light("muted"), linewidth=0.8, linestyle=DASHES, zorder=0.5)
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
            line = Line(OTHER_COLOUR, "beta")
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
    names = [f"interface {each.metric.rpartition('_')[2]}" for each in found]
    lines = [Line(f"problem-{place % NUM_PROBLEM_COLOURS}", name) for place, name in enumerate(names)]
    return curve_card(book, title.replace(": ", "-"), title, found, lines)


KINDS = (("forward", "states", "problem-0", "o"), ("backward", "adjoints", "problem-1", "s"))
MAX_HISTORIES = 40


def residual_cards(book: Sketchbook, series: Sequence[Series]) -> list[Card]:
    """Draw the residuals of each problem's layers, part by part.

    Args:
        book: takes the figures.
        series: those of other keys are left out.
    """
    groups: dict[str, dict[str, dict[int, Series]]] = {}
    for each in series:
        match = RESIDUAL.fullmatch(each.metric)
        if match:
            part, kind, cycle = match.groups()
            name = f"{each.owner}, {part}" if part else each.owner
            groups.setdefault(name, {}).setdefault(kind, {})[int(cycle)] = each
    return [card for name, by_kind in groups.items() for card in _cards(book, name, by_kind)]


def _cards(book: Sketchbook, name: str, by_kind: dict[str, dict[int, Series]]) -> list[Card]:
    figure, axes = book.new()
    handles, labels, lowest = [], [], np.inf
    for kind, label, colour, marker in KINDS:
        histories = _histories(by_kind.get(kind, {}))
        for place, history in enumerate(histories):
            alpha = 0.15 + 0.85 * (place + 1) / len(histories)
            style = {"marker": marker, "markersize": 2.5, "linewidth": 0.9, "alpha": alpha}
            axes.plot(np.arange(len(history)), history, color=light(colour), **style)  # type: ignore[arg-type]
            lowest = min(lowest, np.nanmin(history, initial=np.inf))
        if len(histories):
            handles.append(Line2D([], [], color=light(colour), marker=marker, markersize=3))
            labels.append(label)
    if 0 < lowest < np.inf:
        use_log_scale(axes, "y")
    whole_numbers(axes, "cycle")
    axes.set_ylabel("norm of the residual")
    legend_above(axes, handles, labels)
    note = "One line a logged tick; the later, the stronger."
    by_cycle = book.finish(figure, f"residuals-{name}", f"{name}: residuals of multigrid", note)
    last = [(kind, cycles[max(cycles)]) for kind, cycles in by_kind.items()]
    lines = [Line(colour, label, "-", marker) for kind, label, colour, marker in KINDS if kind in by_kind]
    group = [each for kind, *_ in KINDS for found, each in last if found == kind]
    title = f"{name}: residual after the last cycle"
    return [by_cycle, curve_card(book, f"last-residual-{name}", title, group, lines)]


def _histories(by_cycle: dict[int, Series]) -> NDArray[np.float64]:
    """Return the residuals by tick and cycle, NaN where there is none above 0, of at most MAX_HISTORIES ticks."""
    ticks = np.unique(np.concatenate([each.ticks for each in by_cycle.values()])) if by_cycle else np.zeros(0)
    found = np.full((len(ticks), 1 + max(by_cycle, default=0)), np.nan)
    for cycle, each in by_cycle.items():
        found[np.searchsorted(ticks, each.ticks), cycle] = np.where(each.values > 0, each.values, np.nan)
    if len(ticks) <= MAX_HISTORIES:
        return found
    # Evenly spread, the last one among them.
    return found[np.linspace(0, len(ticks) - 1, MAX_HISTORIES).round().astype(int)]
