"""The figure of the part `times`: how much faster than one thread each rival is, by workload and number of ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.layerparallel.auxiliary import METHODS
from benchmarks.layerparallel.rivals import DATA_PARALLEL, ONE_THREAD

COLORS = {"serial": "tab:gray", "data": "tab:blue", "pipeline": "tab:orange", "mlotool": "tab:green"}
LABELS = {
    "serial": "serial, as many threads as ranks",
    "data": "data parallel",
    "pipeline": "torch.distributed.pipelining",
    "mlotool": "mlotool, auxiliary variables",
}
COLUMNS = 3


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw all settings of a result file: dots at the medians of rounds, lines from quartile to quartile.

    Crosses are the CPU times of the busiest rank, at which idle cores without waiting would end.
    """
    settings = content["settings"]
    num_columns = min(COLUMNS, len(settings))
    num_rows = -(-len(settings) // num_columns)
    size = (3.1 * num_columns + 1.6, 4.0 * num_rows + 0.6)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False)
    names = list(dict.fromkeys(_label(name) for each in settings.values() for name in (*_rows(each), *each["not_run"])))
    for axes, (name, setting) in zip(grid.flat, settings.items(), strict=False):
        _panel(axes, name, setting, names)
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < len(settings))
        axes.tick_params(labelleft=number % num_columns == 0)
    marks = [plt.Line2D([], [], marker="o", linestyle="-", color=color) for color in COLORS.values()]
    marks.append(plt.Line2D([], [], marker="x", linestyle="", color="black"))
    figure.legend(marks, [*LABELS.values(), "by CPU time of the busiest rank"], loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.45 / size[1], 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Axes, name: str, setting: Mapping[str, Any], names: list[str]) -> None:
    for row, wall in _rows(setting).items():
        place, color = names.index(_label(row)), COLORS[_family(row)]
        low, high = 1 / wall["ratio_quartile_3"], 1 / wall["ratio_quartile_1"]
        axes.plot([low, high], [place, place], color=color, linewidth=2)
        axes.plot(1 / wall["ratio"], place, "o", color=color, markersize=5)
        if _family(row) != "serial":
            axes.plot(1 / setting["cpu_time"][row]["ratio"], place, "x", color="black", markersize=4)
    for row in setting["not_run"]:
        axes.text(0.06, names.index(_label(row)), "not run", fontsize=7, va="center")
    axes.axvline(1, color="tab:gray", linewidth=0.8, linestyle=":")
    axes.axvline(setting["num_ranks"], color="tab:gray", linewidth=0.8, linestyle=":")
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5), title=name)
    axes.set_xlim(0, 1.15 * setting["num_ranks"])
    axes.set_xlabel("speed-up over one thread")
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize=8)


def _rows(setting: Mapping[str, Any]) -> dict[str, Any]:
    return {name: wall for name, wall in setting["wall"].items() if name != ONE_THREAD}


def _family(name: str) -> str:
    if name == DATA_PARALLEL:
        return "data"
    return "serial" if name.startswith("serial") else "mlotool" if name in METHODS else "pipeline"


def _label(name: str) -> str:
    # Threads are as many as ranks, and these are in the title.
    return "serial, K threads" if name.startswith("serial") else name.replace("micro-batches", "parts")
