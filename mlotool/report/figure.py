"""One matplotlib drawing, twice: a PNG file, and an inline SVG whose colours follow the reader's mode."""

import io
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from mlotool.core.run_files import write_bytes
from mlotool.report.formats import shortened
from mlotool.report.markup import Markup
from mlotool.report.palette import light, themed

SIZE_INCHES = (4.3, 2.65)
WIDE_INCHES = (8.9, 3.3)
STYLE = {
    "font.size": 8,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "mlotool",
    # Names in a recipe are anybody's text: a dollar sign in them is no formula.
    "text.parse_math": False,
    "text.usetex": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": light("muted"),
    "axes.labelcolor": light("muted"),
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "grid.color": light("line"),
    "grid.linewidth": 0.6,
    "xtick.color": light("muted"),
    "ytick.color": light("muted"),
    "text.color": light("ink"),
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.borderaxespad": 0,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "figure.facecolor": "none",
}


def report_style() -> AbstractContextManager[None]:
    """Return the context in which all figures of a report must be made."""
    return matplotlib.rc_context(STYLE)


@dataclass(frozen=True)
class Card:
    """A figure as the page shows it: a title, the picture, a line below it, and whether it takes a row of its own."""

    title: str
    svg: Markup
    note: str = ""
    is_wide: bool = False


class Sketchbook:
    """Makes the figures of one report, inside `report_style()`, and keeps their file names apart.

    Args:
        folder: where the PNG files go, in the folder of a run or a sweep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def new(self, size: tuple[float, float] = SIZE_INCHES) -> tuple[Figure, Axes]:
        """Return an empty figure; `finish` must see it.

        Args:
            size: width and height in inches; one that is wider than SIZE_INCHES gets a row of the page.
        """
        # Not pyplot: it would keep every figure alive.
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.add_subplot()

    def finish(self, figure: Figure, slug: str, title: str, note: str = "") -> Card:
        """Write the PNG with its title, and return the card with the SVG without it."""
        file = self._file(slug)
        with warnings.catch_warnings():
            # Names in scripts that the font lacks are drawn as boxes in the PNG and as text in the page.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            # The page has headings of its own, so that a title is read out and may wrap.
            heading = figure.suptitle(shortened(title, 60), x=0.01, ha="left", fontsize=9.5)
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=180, facecolor="white")
            write_bytes(self.folder.parent, f"{self.folder.name}/{file.name}", picture.getvalue())
            heading.set_visible(False)
            heading.set_in_layout(False)
            text = io.StringIO()
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        self.files.append(file)
        svg = _inline(text.getvalue(), f"f{len(self.files)}", title)
        return Card(title, svg, note, is_wide=figure.get_figwidth() > SIZE_INCHES[0])

    def _file(self, slug: str) -> Path:
        safe = re.sub(r"[^A-Za-z0-9_-]+", "_", slug)[:80].strip("_-") or "figure"
        taken = {file.stem.lower() for file in self.files}
        name, count = safe, 2
        while name.lower() in taken:
            name, count = f"{safe}_{count}", count + 1
        return self.folder / f"{name}.png"


def _inline(svg: str, prefix: str, title: str) -> Markup:
    svg = svg[svg.index("<svg") :]
    # Two figures in one page must not share ids: clip paths and markers would take the first figure's.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'\sxmlns(?::xlink)?="[^"]*"', "", svg)
    label = re.sub(r'[<>&"]', " ", title)
    return Markup(themed(svg).replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip())


def plain_number() -> Formatter:
    """Return a tick formatter without mathematical markup."""
    return FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"))


def use_log_scale(axes: Axes, which: str) -> None:
    """Put the `x` or `y` axis on a log scale with plain labels."""
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    low, high = getattr(axes, f"get_{which}lim")()
    # A range of few decades has few powers of ten: label 2 and 5 as well.
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,), numticks=8))
    axis.set_major_formatter(plain_number())
    axis.set_minor_formatter(NullFormatter())


def whole_ticks(axes: Axes) -> None:
    """Label the horizontal axis as ticks, which are whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("tick")


def legend_above(axes: Axes, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Put the legend above the axes, where it hides no curve."""
    axes.legend(handles, [_legend_label(label) for label in labels], loc="lower left", bbox_to_anchor=(0, 1), ncols=5)


def _legend_label(name: str) -> str:
    """Return the name as a legend takes it: matplotlib drops those that begin with an underscore."""
    return shortened(f" {name}" if name.startswith("_") else name, 28)
