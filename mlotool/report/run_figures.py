"""The figures of a run: its curves, what its upper problems learned, and what a reweighting net made of the samples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d
from scipy.stats import binned_statistic

from mlotool.folders.run_folder import RunFolder
from mlotool.report import figure as drawing
from mlotool.report.figure import Card, Plot, Sketchbook, light, needs_log_scale
from mlotool.report.formats import LARGEST, number, words
from mlotool.report.recorded_run import Series, read_artifacts

MIN_POINTS_TO_SMOOTH = 40
# Splits share the evaluated problem's colour and differ in line and marker.
SPLIT_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
# Curves of one card with a legend, and learned values of one card that it tells apart.
MAX_NAMED, MAX_LEARNED = 20, 8
TITLES = {
    "lr": "Learning rate", "hypergradient_norm": "Norm of the hypergradient", "beta": "Penalty coefficient beta",
}  # fmt: skip
# Begins the keys of an upper problem's values, as the runner logs them.
LEARNED = "learned_"
# A moving mean of these would show values that were never used.
EXACT = ("lr", "beta", LEARNED)


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its tick, and the key that chose it with its value there."""

    tick: int | None
    key: str
    value: float | None


@dataclass(frozen=True)
class Line:
    """How a series is drawn: the name of its colour, what the legend says, line and marker."""

    colour: str
    label: str
    style: str = "-"
    marker: str = "o"


def training_cards(book: Sketchbook, series: Sequence[Series], colours: Mapping[str, str]) -> list[Card]:
    """Draw what the problems logged while they trained; losses first, the learning rate last.

    Not the number of steps: it is a straight line, and the table of last values has it. Nor rates that stay what they
    are, which `constant_rates` tells.
    """
    own = [curve for curve in series if curve.owner in colours]
    shown = [curve for curve in own if curve.metric != "step" and not _is_constant_rate(curve)]
    owners = list(colours)
    shown.sort(key=lambda x: (-1, owners.index(x.owner)) if x.metric == "loss" else (x.metric == "lr", 0))
    groups: dict[tuple[str, str], list[Series]] = {}
    for curve in shown:
        name = (f"training-{curve.metric}", TITLES.get(curve.metric, f"Training: {words(curve.metric)}"))
        if curve.metric == "loss":
            name = (f"loss-{curve.owner}", f"{curve.owner}: training loss")
        groups.setdefault(name, []).append(curve)
    return [
        curve_card(book, slug, title, group, [Line(colours[curve.owner], curve.owner) for curve in group])
        for (slug, title), group in groups.items()
    ]


def constant_rates(series: Iterable[Series], colours: Mapping[str, str]) -> str:
    """Return a sentence of the learning rates that stay what they are; empty where there are none."""
    own = [curve for curve in series if curve.owner in colours and _is_constant_rate(curve)]
    rates = ", ".join(f"{curve.owner} {number(float(curve.values[0]))}" for curve in own)
    return f"Constant learning rate{'s' if len(own) > 1 else ''}: {rates}." if own else ""


def _is_constant_rate(series: Series) -> bool:
    return series.metric == "lr" and bool((series.values == series.values[:1]).all())


def evaluation_cards(
    book: Sketchbook, series: Sequence[Series], splits: Iterable[str], colour: str, best: Best
) -> list[Card]:
    """Draw what was evaluated on each split, with the best checkpoint marked."""
    lines = {split: Line(colour, split, *SPLIT_STYLES[place % 4]) for place, split in enumerate(splits)}
    groups: dict[str, list[Series]] = {}
    for curve in series:
        if curve.owner in lines:
            groups.setdefault(curve.metric, []).append(curve)
    cards = []
    for metric, group in groups.items():
        group.sort(key=lambda curve: list(lines).index(curve.owner))
        drawn = [lines[curve.owner] for curve in group]
        cards.append(curve_card(book, f"evaluation-{metric}", f"Evaluation: {words(metric)}", group, drawn, best))
    return cards


def learned_cards(book: Sketchbook, series: Sequence[Series], colours: Mapping[str, str]) -> list[Card]:
    """Draw what small upper problems have learned over time: a card for each, with a curve for each of its values."""
    cards = []
    for owner, colour in colours.items():
        group = [curve for curve in series if curve.owner == owner]
        names = [curve.metric.removeprefix(LEARNED).replace("_", " ") for curve in group]
        lines = [Line(colour, name, "-", "") for name in names]
        if 1 < len(group) <= MAX_LEARNED:
            lines = [Line(f"problem-{place}", name, SPLIT_STYLES[place % 4][0], "") for place, name in enumerate(names)]
        what = f"learned {names[0]}" if len(group) == 1 else f"the {len(group)} learned values"
        if group:
            cards.append(curve_card(book, f"learned-{owner}", f"{owner}: {what}", group, lines, num_named=MAX_LEARNED))
    return cards


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
    plot = book.new()
    values = np.concatenate([curve.finite for curve in group])
    handles = [_draw(plot, curve, line) for curve, line in zip(group, lines, strict=True)]
    labels = [line.label for line in lines]
    if best is not None and best.tick is not None and len(values):
        labels.append(f"best checkpoint, {best.tick}")
        handles.append(plot.axes.axvline(best.tick, color=light("muted"), linewidth=0.8, linestyle=drawing.DASHES))
        for curve, line in zip(group, lines, strict=True):
            if curve.key == best.key and isinstance(best.value, int | float) and abs(best.value) < LARGEST:
                star: dict[str, Any] = {"color": light(line.colour), "markersize": 9, "clip_on": False, "zorder": 5}
                labels[-1] = f"best {number(best.value)} at {best.tick}"
                handles[-1:] = plot.axes.plot([best.tick], [best.value], "*", linestyle="none", **star)
                # It may lie outside the curve, where metrics.csv was cut.
                values = np.append(values, best.value)
    if not len(values):
        place: dict[str, Any] = {"transform": plot.axes.transAxes, "ha": "center", "color": light("muted")}
        plot.axes.text(0.5, 0.5, "no finite value", **place)
    elif needs_log_scale(values):
        plot.use_log_scale()
    elif values.min() == values.max():
        drawing.visible_range(values.tolist()).apply(plot)
    cross: dict[str, Any] = {"color": light("failed"), "markersize": 5, "clip_on": False}
    for curve in group:
        for tick in curve.not_finite[:1]:
            plot.axes.plot([tick], [0.0], "x", transform=plot.axes.get_xaxis_transform(), **cross)
    plot.label("tick", is_whole=True)
    # All panels of a page begin where the run does.
    plot.axes.set_xlim(left=min(0.0, *(float(curve.ticks[0]) for curve in group)))
    if 1 < len(group) <= num_named or best is not None:
        plot.legend(handles, labels)
    return plot.card(slug, title, _note(group, lines, best))


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return a centered moving mean over about a fifteenth of the curve, or None where that is too short for one."""
    if len(values) < MIN_POINTS_TO_SMOOTH:
        return None
    width = 2 * max(1, len(values) // 30) + 1
    known = ~np.isnan(values)
    share = uniform_filter1d(known.astype(float), width, mode="constant")
    mean = uniform_filter1d(np.where(known, values, 0.0), width, mode="constant")
    return np.where(share * width > 0.5, mean / np.maximum(share, 0.5 / width), np.nan)


def _draw(plot: Plot, series: Series, line: Line) -> Line2D:
    style: dict[str, Any] = {"color": light(line.colour), "linestyle": line.style}
    smooth = None if series.metric.startswith(EXACT) else smoothed(series.values)
    if smooth is not None:
        plot.axes.plot(series.ticks, series.values, color=light(line.colour), linewidth=0.7, alpha=0.5)
        return plot.axes.plot(series.ticks, smooth, linewidth=1.6, **style)[0]
    is_point = len(series.ticks) == 1
    marker = line.marker or "o" if is_point else line.marker if len(series.ticks) <= 30 else None
    style |= {"marker": marker, "markersize": 5 if is_point else 3}
    return plot.axes.plot(series.ticks, series.values, linewidth=1.4, **style)[0]


def _note(group: Sequence[Series], lines: Sequence[Line], best: Best | None) -> str:
    notes = []
    for curve, line in zip(group, lines, strict=True):
        if num := len(curve.not_finite):
            what, first = f"value{' was' if num == 1 else 's were'} not finite", number(float(curve.not_finite[0]))
            notes.append(f"{line.label}: {num} {what}, first at tick {first} (cross).")
        if len(curve.ticks) == 1 and len(curve.finite):
            tick = number(float(curve.ticks[0]))
            is_best = best is not None and best.tick == curve.ticks[0]
            place = f"at the best checkpoint (tick {tick})" if is_best else f"at tick {tick}"
            notes.append(f"{line.label}: {number(float(curve.values[0]))} {place}.")
    return " ".join(notes)


# A page of some hundred kilobytes; as one picture of pixels the marks would not follow the reader's mode.
MAX_POINTS = 1500
# Artifacts that are looked at.
MAX_FILES = 20
# Of a histogram, of a curve of medians, and of what a median is drawn of.
NUM_BINS, NUM_INTERVALS, MIN_SAMPLES = 36, 24, 5


@dataclass(frozen=True)
class Weighting:
    """The arrays of one artifact.

    Args:
        name: of the artifact, weights of artifacts/weights.npz.
        loss: per sample, finite, [n]; None where the artifact has weights alone.
        weight: per sample, finite, [n].
        clean: whether the sample's label is right, [n]; None where nobody knows.
    """

    name: str
    loss: NDArray[np.float64] | None
    weight: NDArray[np.float64]
    clean: NDArray[np.bool_] | None

    def groups(self, plain: str) -> list[tuple[str, str, NDArray[np.bool_]]]:
        """Return (label, colour name, mask) of the samples to be told apart; no mask is empty."""
        if self.clean is None:
            return [("all samples", plain, np.ones(len(self.weight), dtype=bool))]
        groups = [("right label", "right", self.clean), ("wrong label", "wrong", ~self.clean)]
        return [group for group in groups if group[2].any()]


def read_weightings(folder: RunFolder) -> tuple[list[Weighting], list[str]]:
    """Read every artifact of a run folder that has an array `weight`.

    Returns:
        the weightings, and a note for each artifact that has one but cannot be drawn.
    """

    def read(name: str) -> Weighting | None:
        arrays = folder.arrays(name, needed=("weight",), wanted=("loss", "clean"))
        if not arrays:
            return None
        sizes = {array.size for array in arrays.values()}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(f"expected arrays of one length above 0, found {sorted(sizes)}")
        known = np.all([np.abs(array.ravel()) < LARGEST for array in arrays.values()], axis=0)
        if not known.any():
            raise ValueError("no finite value in it")
        arrays = {key: array.ravel()[known] for key, array in arrays.items()}
        clean = arrays["clean"].astype(bool) if "clean" in arrays else None
        return Weighting(Path(name).stem, arrays.get("loss"), arrays["weight"], clean)

    return read_artifacts(folder, ".npz", MAX_FILES, read)


def weighting_cards(book: Sketchbook, weighting: Weighting, metrics: Mapping[str, Any], colour: str) -> list[Card]:
    """Draw who got which weight, and the weight against the loss where there are losses."""
    scatter = [] if weighting.loss is None else [scatter_card(book, weighting, weighting.loss, colour)]
    return [*scatter, _histogram(book, weighting, colour, _facts(weighting, metrics))]


def scatter_card(
    book: Sketchbook, weighting: Weighting, loss: NDArray[np.float64], colour: str, note: str = ""
) -> Card:
    """Draw the weight against the loss, for at most `MAX_POINTS` samples, with medians over intervals of the loss."""
    plot = book.new()
    chosen = np.zeros(len(loss), dtype=bool)
    chosen[np.random.default_rng(0).permutation(len(loss))[:MAX_POINTS]] = True
    for label, name, mask in weighting.groups(colour):
        style: dict[str, Any] = {"marker": "x", "linewidths": 0.9} if name == "wrong" else {"linewidths": 0}
        x, y = loss[mask & chosen], weighting.weight[mask & chosen]
        plot.axes.scatter(x, y, s=11, color=light(name), alpha=0.55, label=label, **style)
    is_log = needs_log_scale(loss)
    places = np.log(loss) if is_log else loss
    if np.ptp(places) > 0:
        # Of too few samples there is no median, and the line breaks.
        edges = np.linspace(places.min(), places.max(), NUM_INTERVALS + 1)
        medians = binned_statistic(places, [loss, weighting.weight], "median", edges).statistic
        medians[:, np.histogram(places, edges)[0] < MIN_SAMPLES] = np.nan
        plot.axes.plot(*medians, color=light("ink"), linewidth=1.3, marker="o", markersize=2.5, label="median")
    if is_log:
        plot.use_log_scale("x")
    plot.label("loss of the sample", "weight")
    plot.axes.yaxis.set_major_formatter(drawing.plain_number())
    plot.legend()
    note = f"{MAX_POINTS} of {len(loss)} samples, drawn at random." if len(loss) > MAX_POINTS else note
    return plot.card(f"{weighting.name}-against-loss", f"{weighting.name}: weight against loss", note)


def _histogram(book: Sketchbook, weighting: Weighting, colour: str, note: str) -> Card:
    plot = book.new()
    low, high = float(weighting.weight.min()), float(weighting.weight.max())
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, NUM_BINS + 1)
    for label, name, mask in weighting.groups(colour):
        share = np.histogram(weighting.weight[mask], edges)[0] / mask.sum()
        plot.axes.stairs(share, edges, fill=True, color=light(name), alpha=0.28)
        style: dict[str, Any] = {"linewidth": 1.4, "hatch": "////" if name == "wrong" else None}
        plot.axes.stairs(share, edges, color=light(name), label=f"{label} ({mask.sum()})", **style)
    plot.axes.set_ylim(bottom=0)
    plot.label("weight", "share of the group")
    plot.legend()
    return plot.card(f"{weighting.name}-histogram", f"{weighting.name}: distribution of the weights", note)


def _facts(weighting: Weighting, metrics: Mapping[str, Any]) -> str:
    facts = []
    weight = weighting.weight
    if len(weight) > 1 and float(weight.max() - weight.min()) <= 0.01 * float(abs(weight).max()):
        facts.append("All weights are within 1% of each other: all samples count the same.")
    auc = metrics.get(f"{weighting.name}/wrong_label_auc")
    if isinstance(auc, int | float):
        facts.append(f"Wrong labels are found with AUC {number(auc)} (0.5 is chance, 1 is perfect).")
    for label, _, mask in weighting.groups("ink"):
        facts.append(f"Mean weight, {label}: {number(float(weighting.weight[mask].mean()))}.")
    return " ".join(facts)
