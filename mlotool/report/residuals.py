"""How multigrid across layers converged: its residuals over the cycles, and the last one over the ticks."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mlotool.report.curves import Line, curve_card
from mlotool.report.figure import Card, Sketchbook, legend_above, use_log_scale
from mlotool.report.palette import light
from mlotool.report.series import Series

# The part's name, where a module has several; then which solve, and after how many cycles.
RESIDUAL = re.compile(r"(?:(.+)\.)?(forward|backward)_residual_(\d+)")
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
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel("cycle")
    axes.set_ylabel("norm of the residual")
    legend_above(axes, handles, labels)
    note = "One line a logged tick; the later, the stronger."
    by_cycle = book.finish(figure, f"residuals-{name}", f"{name}: residuals of multigrid", note)
    last = [(kind, cycles[max(cycles)]) for kind, cycles in by_kind.items()]
    lines = [Line(colour, "-", marker, label) for kind, label, colour, marker in KINDS if kind in by_kind]
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
