"""What upper problems gave the problems below them: mean and histogram over time, and against the samples' losses."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from numpy.typing import NDArray

from mlotool.folders.run_folder import RunFolder
from mlotool.report.figure import Card, Plot, Sketchbook, light
from mlotool.report.formats import LARGEST, number
from mlotool.report.recorded_run import Series, read_artifacts
from mlotool.report.run_figures import Weighting, scatter_card

Array = NDArray[np.float64]
# The keys that the runner logs of an output: `<problem>/<output>_<fact>`.
FACTS = ("mean", "std", "min", "max")
# Files that are looked at, and outputs that are drawn.
MAX_FILES, MAX_OUTPUTS = 40, 12
# Of the heat map, and its shades.
NUM_COLUMNS, NUM_ROWS, NUM_SHADES = 60, 24, 6
# Begins the names of the artifacts.
PREFIX = "outputs_"

Key = tuple[str, str]


@dataclass(frozen=True)
class History:
    """The arrays of one artifact.

    Args:
        problem: the upper one.
        name: of the output.
        tick: of each histogram, [n].
        low: where its bins begin, [n].
        high: where they end, [n].
        count: what they hold, [n, bins].
        value: of the last samples, [m]; empty where there is not one value per sample.
        loss: of these samples, [m].
    """

    problem: str
    name: str
    tick: Array
    low: Array
    high: Array
    count: Array
    value: Array
    loss: Array


def read_histories(folder: RunFolder) -> tuple[list[History], list[str]]:
    """Read every artifact of a run folder that has the histograms of an output, and notes on what cannot be drawn."""

    def read(name: str) -> History | None:
        problem, _, output = Path(name).stem.removeprefix(PREFIX).partition(".")
        if not Path(name).stem.startswith(PREFIX) or not output:
            return None
        arrays = folder.arrays(name, needed=("tick", "low", "high", "count"), wanted=("value", "loss"))
        if not arrays:
            return None
        value, loss = (arrays.get(key, np.empty(0)).ravel() for key in ("value", "loss"))
        tick, low, high, count = (arrays[key] for key in ("tick", "low", "high", "count"))
        if not (
            tick.shape == low.shape == high.shape == count.shape[:1] and count.ndim == 2 and len(value) == len(loss)
        ):
            raise ValueError("expected arrays of one length")
        if not all((np.abs(array) < LARGEST).all() for array in (tick, low, high, count, value, loss)):
            raise ValueError("a value in it is not finite")
        return History(problem, output, tick, low, high, count, value, loss)

    return read_artifacts(folder, ".npz", MAX_FILES, read)


def split_series(series: Sequence[Series]) -> tuple[dict[Key, dict[str, Series]], list[Series]]:
    """Return the series of outputs, by problem and name of the output and by fact, and all other series."""
    groups: dict[Key, dict[str, Series]] = {}
    for curve in series:
        name, _, fact = curve.metric.rpartition("_")
        if name and fact in FACTS:
            groups.setdefault((curve.owner, name), {})[fact] = curve
    given = {key: facts for key, facts in groups.items() if len(facts) == len(FACTS)}
    taken = {curve.key for facts in given.values() for curve in facts.values()}
    return given, [curve for curve in series if curve.key not in taken]


def output_cards(
    book: Sketchbook,
    given: Mapping[Key, Mapping[str, Series]],
    histories: Sequence[History],
    colours: Mapping[str, str],
    analysed: Collection[str] = (),
) -> list[Card]:
    """Draw each output over time and, where it has one value per sample, against the samples' losses.

    Args:
        book: keeps the figures.
        given: the series of outputs, as `split_series` returns them.
        histories: of outputs.
        colours: by problem, the name of its colour.
        analysed: problems whose values an analysis has drawn against the loss, of all samples.
    """
    by_key = {(history.problem, history.name): history for history in histories}
    cards: list[Card] = []
    for key, facts in [*given.items()][:MAX_OUTPUTS]:
        history, colour = by_key.get(key), colours.get(key[0], "ink")
        cards.append(_over_time(book, key, facts, history, colour))
        if history is not None and len(history.value) and np.ptp(history.value) > 0 and key[0] not in analysed:
            cards.append(_against_loss(book, history, colour))
    return cards


def _over_time(book: Sketchbook, key: Key, facts: Mapping[str, Series], history: History | None, colour: str) -> Card:
    plot, (problem, name) = book.new(), key
    mean, spread, low, high = (facts[fact] for fact in FACTS)
    has_map = history is not None and len(history.tick) > 1
    if history is not None and has_map:
        _heat_map(plot, history, colour)
    style: dict[str, Any] = {"color": light("ink"), "marker": "o" if len(mean.ticks) == 1 else None, "markersize": 4}
    plot.axes.plot(mean.ticks, mean.values, linewidth=1.4, label="mean", **style)
    common = min(len(mean.values), len(spread.values))
    below, above = (mean.values[:common] + sign * spread.values[:common] for sign in (-1, 1))
    ticks = mean.ticks[:common]
    outer: dict[str, Any] = {"color": light("ink"), "linewidth": 0.7}
    plot.axes.plot(ticks, below, linestyle="--", label="mean \N{PLUS-MINUS SIGN} standard deviation", **outer)
    plot.axes.plot(ticks, above, linestyle="--", **outer)
    # A heat map shows where values end.
    for curve, label in ((low, "smallest and largest"), (high, None)) if not has_map else ():
        plot.axes.plot(curve.ticks, curve.values, linestyle=":", label=label, **outer)
    plot.label("tick", "value", is_whole=True)
    plot.axes.set_xlim(left=0.0)
    plot.legend()
    known = mean.finite
    last = f"Mean at the end: {number(float(known[-1]))}." if len(known) else ""
    what = "what it returns" if name == "output" else name.removeprefix("output_").replace("_", " ")
    shade = "Darker: more values." if has_map else ""
    return plot.card(f"outputs-{problem}-{name}", f"{problem}: {what}", " ".join(filter(None, (shade, last))))


def _heat_map(plot: Plot, history: History, colour: str) -> None:
    """Draw the histograms as columns of cells, a darker one where it has more of its column's values."""
    low, high = float(history.low.min()), float(history.high.max())
    high = high if high > low else low + 1.0
    chosen = np.unique(np.linspace(0, len(history.tick) - 1, NUM_COLUMNS).round().astype(int))
    edges = np.linspace(low, high, NUM_ROWS + 1)
    ticks = history.tick[chosen]
    borders = np.concatenate([[ticks[0] - (ticks[1] - ticks[0])], ticks])
    cells: dict[int, list[tuple[float, float, float, float]]] = {}
    for place, row in enumerate(chosen):
        middles = np.linspace(history.low[row], history.high[row], 2 * history.count.shape[1] + 1)[1::2]
        share = np.histogram(middles, edges, weights=history.count[row])[0]
        share = share / max(share.sum(), 1.0)
        # A square root, so that a few per cent are still seen.
        for level in np.flatnonzero(share):
            shade = int(np.ceil(NUM_SHADES * np.sqrt(share[level])))
            cells.setdefault(shade, []).append((borders[place], borders[place + 1], edges[level], edges[level + 1]))
    for shade, rectangles in sorted(cells.items()):
        # One path a shade: a cell of its own would be ten times as long.
        corners = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)] for x0, x1, y0, y1 in rectangles]
        outline = Outline.make_compound_path(*(Outline(points, closed=True) for points in corners))
        alpha = 0.12 + 0.75 * shade / NUM_SHADES
        plot.axes.add_patch(PathPatch(outline, facecolor=light(colour), edgecolor="none", alpha=alpha, linewidth=0))
    plot.axes.autoscale_view()


def _against_loss(book: Sketchbook, history: History, colour: str) -> Card:
    name = history.problem if history.name == "output" else f"{history.problem}, {history.name}"
    weighting = Weighting(f"outputs-{name}", history.loss, history.value, None)
    note = (
        f"{len(history.loss)} samples of the last batches that were logged. Their loss is the number of samples times "
        "the derivative of the lower loss; if weights are divided by their sum, it is an affine function of their loss."
    )
    card = scatter_card(book, weighting, history.loss, colour, note)
    return Card(f"{name}: value against the sample's loss", card.svg, card.note)
