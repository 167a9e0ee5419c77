"""Dynamic memory against depth, for the documentation."""

import json
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "images" / "mixflow_memory.png"
TITLES = {"unrolled, maml, sgd": "Unrolled, two steps", "implicit, weighting, sgd": "Implicit, two products"}
LINES = {
    "reverse": ("#c0504d", 0),
    "forward": ("#e0953a", 0),
    "reverse + remat": ("#3f7fbf", 6),
    "forward + remat": ("#2e8b57", -6),
}
"""By way: its colour, and how far its name is moved up, in points. The engine before is near reverse: not drawn."""


def draw(source: Path, path: Path = PATH) -> Path:
    """Write the picture of what the part `peaks` has found, and return where.

    Args:
        source: mixflow_peaks.json.
        path: a PNG file.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(source.read_text())["rows"]
    figure, axes = pyplot.subplots(1, len(TITLES), figsize=(8.4, 3.8), sharey=True)
    for axis, (title, caption) in zip(axes, TITLES.items(), strict=True):
        own = [row for row in rows if row["title"] == title]
        depths = [row["num_layers"] for row in own]
        for name, (colour, shift) in LINES.items():
            values = [row["memory"][name]["dynamic"] / 2**20 for row in own]
            axis.plot(depths, values, marker="o", markersize=3.5, color=colour, linewidth=1.6)
            end, place, label = (depths[-1], values[-1]), (6, shift), f"{name}  {values[-1]:.0f}"
            axis.annotate(label, end, place, textcoords="offset points", color=colour, fontsize=8, va="center")
        axis.set_title(caption, fontsize=10, loc="left")
        axis.set_xlabel("layers")
        axis.set_xticks(depths)
        axis.set_xlim(0, 1.6 * depths[-1])
        axis.grid(axis="y", alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("dynamic memory of a hypergradient, MiB")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
