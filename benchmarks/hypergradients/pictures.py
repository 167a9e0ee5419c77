"""Curves against steps and against time, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One line of a picture.

    Args:
        name: in the legend; of a peer, with its name in brackets, it is dashed.
        x: one sequence a panel.
        y: the values, the same in all panels.
    """

    name: str
    x: Sequence[Sequence[float]]
    y: Sequence[float]


def draw(path: Path, title: str, x_labels: Sequence[str], y_label: str, curves: Sequence[Curve], log: str = "") -> None:
    """Write a picture of small panels.

    Args:
        path: a PNG file.
        title: above all panels.
        x_labels: one a panel.
        y_label: of all.
        curves: the lines.
        log: the axes that are logarithmic, "y" or "xy".
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(x_labels), figsize=(4.6 * len(x_labels) + 2.2, 3.8), sharey=True, squeeze=False
    )
    # The same colour and line for an algorithm, whoever runs it.
    colours = {name: f"C{number % 10}" for number, name in enumerate(dict.fromkeys(_own(each.name) for each in curves))}
    for panel, (axis, label) in enumerate(zip(axes[0], x_labels, strict=True)):
        for number, curve in enumerate(curves):
            style = ":" if curve.name != _own(curve.name) else ("-" if number < 10 else "--")
            axis.plot(curve.x[panel], curve.y, style, color=colours[_own(curve.name)], label=curve.name, linewidth=1.3)
        axis.set_xlabel(label)
        if "y" in log:
            axis.set_yscale("log")
        if "x" in log:
            axis.set_xscale("log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y_label)
    axes[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _own(name: str) -> str:
    return name.split(" (")[0]
