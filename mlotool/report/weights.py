"""What a reweighting net learned: the weight of each sample against its loss, and who got which weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import list_files
from mlotool.report.arrays import read_arrays
from mlotool.report.figure import Card, Sketchbook, legend_above, light, needs_log_scale, plain_number, use_log_scale
from mlotool.report.formats import LARGEST, number

# A page of some hundred kilobytes; as one picture of pixels the marks would not follow the reader's mode.
MAX_POINTS = 1500
MAX_FILES = 20
"""Artifacts that are looked at."""
NUM_BINS = 36
NUM_INTERVALS = 24
MIN_SAMPLES = 5
"""That a median is drawn of."""


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


def read_weightings(run_dir: Path) -> tuple[list[Weighting], list[str]]:
    """Read every artifact of a run folder that has an array `weight`.

    Returns:
        the weightings, and a note for each artifact that has one but cannot be drawn.
    """
    found, notes = [], []
    try:
        names = list_files(run_dir, "artifacts", ".npz", MAX_FILES)
    except RunFileError as error:
        return [], [str(error)]
    for name in names:
        try:
            arrays = read_arrays(run_dir, name, needed=("weight",), wanted=("loss", "clean"))
            if arrays:
                found.append(_weighting(Path(name).stem, arrays))
        except (RunFileError, ValueError, MemoryError) as error:
            notes.append(f"{name} could not be drawn: {error}")
    return found, notes


def weighting_cards(book: Sketchbook, weighting: Weighting, metrics: Mapping[str, Any], colour: str) -> list[Card]:
    """Draw the histogram of one artifact, and the scatter where it has losses."""
    scatter = [] if weighting.loss is None else [_scatter(book, weighting, weighting.loss, colour)]
    return [*scatter, _histogram(book, weighting, colour, _facts(weighting, metrics))]


def _weighting(name: str, arrays: dict[str, Any]) -> Weighting:
    found = {key: np.asarray(value).ravel() for key, value in arrays.items()}
    sizes = {len(value) for value in found.values()}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(f"expected arrays of one length above 0, found {sorted(sizes)}")
    values = {key: value.astype(np.float64) for key, value in found.items() if key != "clean"}
    known = np.all([np.abs(value) < LARGEST for value in values.values()], axis=0)
    if not known.any():
        raise ValueError("no finite value in it")
    clean = found["clean"].astype(bool)[known] if "clean" in found else None
    return Weighting(name, values["loss"][known] if "loss" in values else None, values["weight"][known], clean)


def _scatter(book: Sketchbook, weighting: Weighting, loss: NDArray[np.float64], colour: str) -> Card:
    figure, axes = book.new()
    chosen = np.zeros(len(loss), dtype=bool)
    chosen[np.random.default_rng(0).permutation(len(loss))[:MAX_POINTS]] = True
    for label, name, mask in weighting.groups(colour):
        mark = "x" if name == "wrong" else "o"
        style = {"linewidths": 0.9} if mark == "x" else {"linewidths": 0}
        axes.scatter(
            loss[mask & chosen],
            weighting.weight[mask & chosen],
            s=11,
            marker=mark,
            color=light(name),
            alpha=0.55,
            label=label,
            **style,
        )
    is_log = needs_log_scale(loss)
    line = axes.plot(
        *_medians(loss, weighting.weight, is_log=is_log), color=light("ink"), linewidth=1.3, label="median"
    )[0]
    line.set(marker="o", markersize=2.5)
    if is_log:
        use_log_scale(axes, "x")
    axes.set_xlabel("loss of the sample")
    axes.set_ylabel("weight")
    axes.yaxis.set_major_formatter(plain_number())
    legend_above(axes, *axes.get_legend_handles_labels())
    shown = min(len(loss), MAX_POINTS)
    note = f"{shown} of {len(loss)} samples, drawn at random." if shown < len(loss) else ""
    return book.finish(figure, f"{weighting.name}-against-loss", f"{weighting.name}: weight against loss", note)


def _medians(
    loss: NDArray[np.float64], weight: NDArray[np.float64], *, is_log: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median weight in intervals of the axis; of too few samples NaN, at which the line breaks."""
    places = np.log(loss) if is_log else loss
    low, width = places.min(), max(float(np.ptp(places)) / NUM_INTERVALS, 1e-300)
    interval = np.minimum((places - low) / width, NUM_INTERVALS - 1).astype(int)
    medians = np.full((2, NUM_INTERVALS), np.nan)
    for index in range(NUM_INTERVALS):
        mask = interval == index
        if mask.sum() >= MIN_SAMPLES:
            medians[:, index] = np.median(loss[mask]), np.median(weight[mask])
    return medians[0], medians[1]


def _histogram(book: Sketchbook, weighting: Weighting, colour: str, note: str) -> Card:
    figure, axes = book.new()
    low, high = float(weighting.weight.min()), float(weighting.weight.max())
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, NUM_BINS + 1)
    for label, name, mask in weighting.groups(colour):
        counts, _ = np.histogram(weighting.weight[mask], edges)
        share = counts / mask.sum()
        hatch = "////" if name == "wrong" else None
        axes.stairs(share, edges, fill=True, color=light(name), alpha=0.28)
        axes.stairs(share, edges, color=light(name), linewidth=1.4, label=f"{label} ({mask.sum()})", hatch=hatch)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("weight")
    axes.set_ylabel("share of the group")
    legend_above(axes, *axes.get_legend_handles_labels())
    return book.finish(figure, f"{weighting.name}-histogram", f"{weighting.name}: who got which weight", note)


def _facts(weighting: Weighting, metrics: Mapping[str, Any]) -> str:
    facts = []
    if len(weighting.weight) > 1 and np.ptp(weighting.weight) <= 0.01 * abs(weighting.weight).max():
        facts.append("All weights are within 1% of each other: all samples count the same.")
    auc = metrics.get(f"{weighting.name}/wrong_label_auc")
    if isinstance(auc, int | float):
        facts.append(f"Wrong labels are found with AUC {number(auc)} (0.5 is chance, 1 is perfect).")
    for label, _, mask in weighting.groups("ink"):
        facts.append(f"Mean weight, {label}: {number(float(weighting.weight[mask].mean()))}.")
    return " ".join(facts)
