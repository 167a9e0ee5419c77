"""One matplotlib figure as SVG whose colours follow the reader's mode, and what the figures share: scales and legends.

Problems take their colours in the order of the recipe, from a variant of the Okabe-Ito palette that colour-blind
readers can tell apart, darkened (light mode) or lightened (dark mode) until each has 3:1 against its background.
"""

import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from mlotool.folders.safe_files import write_text
from mlotool.report.formats import SMALLEST, shortened

# name: (light, dark). Each light colour occurs once, so that it can be found again in a finished SVG.
THEME: dict[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#101318"),
    "card": ("#fdfdfe", "#181c23"),
    "ink": ("#1b2129", "#e8ebef"),
    "muted": ("#5a6472", "#9ba5b3"),
    "line": ("#dde1e7", "#2d343e"),
    "problem-0": ("#0072b2", "#5ab4f0"),
    "problem-1": ("#cf5300", "#ff8f45"),
    "problem-2": ("#00875f", "#35c99c"),
    "problem-3": ("#b2528f", "#e58fc3"),
    "problem-4": ("#946800", "#e0b13e"),
    "problem-5": ("#5a4fb8", "#a99eff"),
    "problem-6": ("#2b8fbf", "#8ed8f8"),
    "problem-7": ("#7d5a3c", "#cfb08a"),
    "right": ("#7b8593", "#8a95a4"),
    "wrong": ("#c2185b", "#ff6b9d"),
    "finished": ("#1a7f4b", "#4cc38a"),
    "failed": ("#c62f2f", "#ff7b72"),
    "interrupted": ("#9a6500", "#e3b04b"),
}
NUM_PROBLEM_COLOURS = 8
SIZE_INCHES, WIDE_INCHES = (4.3, 2.65), (8.9, 3.3)
# Of a legend: a letter, and a row.
LETTER_INCHES, LEGEND_ROW_INCHES = 0.056, 0.165
DASHES = (0, (2, 2))


def light(name: str) -> str:
    """Return the hex colour of the light mode, by which matplotlib draws."""
    return THEME[name][0]


STYLE = {
    "font.size": 8, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "mlotool",
    # Names in a recipe are anybody's text: a dollar sign in them is no formula.
    "text.parse_math": False, "text.usetex": False, "text.color": light("ink"),
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": light("muted"), "axes.linewidth": 0.6,
    "axes.labelcolor": light("muted"), "axes.grid": True, "axes.axisbelow": True, "axes.facecolor": "none",
    "axes.formatter.useoffset": False, "grid.color": light("line"), "grid.linewidth": 0.6,
    "xtick.color": light("muted"), "ytick.color": light("muted"), "figure.facecolor": "none",
    "legend.frameon": False, "legend.fontsize": 7.5, "legend.borderaxespad": 0, "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    # A curve of a million points becomes one of a few thousand that looks the same, with all spikes.
    "path.simplify_threshold": 0.5,
}  # fmt: skip


def report_style() -> AbstractContextManager[None]:
    """Return the context in which all figures of a report must be made."""
    return matplotlib.rc_context(STYLE)


def problem_colours(problems: Iterable[str]) -> dict[str, str]:
    """Return each problem's colour name; beyond eight problems the colours repeat."""
    return {problem: f"problem-{index % NUM_PROBLEM_COLOURS}" for index, problem in enumerate(problems)}


def themed(svg: str) -> str:
    """Return the SVG with every colour of the light theme replaced by its CSS variable."""
    names = {pair[0]: f"var(--{name})" for name, pair in THEME.items()}
    return re.sub("|".join(names), lambda match: names[match.group().lower()], svg, flags=re.IGNORECASE)


def css_variables() -> str:
    """Return the rules that define the colours for both modes."""
    rules = [":root{" + "".join(f"--{name}:{pair[mode]};" for name, pair in THEME.items()) + "}" for mode in (0, 1)]
    return f"{rules[0]}\n@media (prefers-color-scheme: dark){{{rules[1]}}}"


@dataclass(frozen=True)
class Card:
    """A figure as the page shows it: a title, the picture, a line below it, and whether it takes a row of its own."""

    title: str
    svg: Markup
    note: str = ""
    is_wide: bool = False


class Plot:
    """A figure of one pair of axes.

    Args:
        book: which keeps it.
        size: width and height in inches; a wider one than usual gets a row of the page.
        left: inches beside the axes, for the labels there.
    """

    def __init__(self, book: "Sketchbook", size: tuple[float, float], left: float) -> None:
        # Not pyplot: it would keep every figure alive. Nor a layout that is computed: it would draw everything twice.
        self.figure, self.book, self.left = Figure(figsize=size), book, left
        self.axes = self.figure.add_subplot()
        self.num_legend_rows = 0

    def label(self, x: str = "", y: str = "", *, is_whole: bool = False) -> None:
        """Label the axes; the horizontal one may have whole numbers alone."""
        if is_whole:
            self.axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        self.axes.set_xlabel(shortened(x, 60))
        self.axes.set_ylabel(shortened(y, 40))

    def use_log_scale(self, which: str = "y") -> None:
        """Put the `x` or `y` axis on a log scale with plain labels."""
        getattr(self.axes, f"set_{which}scale")("log")
        axis = getattr(self.axes, f"{which}axis")
        low, high = getattr(self.axes, f"get_{which}lim")()
        # A range of few decades has few powers of ten: label 2 and 5 as well.
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,), numticks=8))
        axis.set_major_formatter(plain_number())
        axis.set_minor_formatter(NullFormatter())

    def legend(self, handles: Sequence[Artist] | None = None, labels: Sequence[str] = ()) -> None:
        """Put a legend above the axes, where it hides no curve; of all labeled artists where none are named."""
        if handles is None:
            handles, labels = self.axes.get_legend_handles_labels()
        # matplotlib drops labels that begin with an underscore.
        texts = [shortened(f" {label}" if label.startswith("_") else label, 28) for label in labels]
        room = self.figure.get_figwidth() - self.left
        num_columns = max(1, int(room / (0.45 + LETTER_INCHES * max(map(len, texts), default=0))))
        self.num_legend_rows = math.ceil(len(texts) / num_columns)
        self.axes.legend(handles, texts, loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns)

    def card(self, slug: str, title: str, note: str = "") -> Card:
        """Write the figure as an SVG file; return it as a card, which has the title: a heading may take two lines."""
        width, height = self.figure.get_size_inches()
        left = self.left + (0.17 if self.axes.get_ylabel() else 0.0)
        top = 0.12 + LEGEND_ROW_INCHES * self.num_legend_rows
        bottom = 0.42 if self.axes.get_xlabel() else 0.25
        margins = {"left": left / width, "right": 1 - 0.16 / width, "bottom": bottom / height, "top": 1 - top / height}
        self.figure.subplots_adjust(**margins)
        text = io.StringIO()
        with warnings.catch_warnings():
            # The page has letters that matplotlib's font lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.figure.savefig(text, format="svg", transparent=True, metadata=metadata)
        safe = re.sub(r"[^A-Za-z0-9_-]+", "_", slug)[:80].strip("_-") or "figure"
        names = (safe if count == 1 else f"{safe}_{count}" for count in range(1, len(self.book.names) + 2))
        self.book.names.append(next(name for name in names if name.lower() not in map(str.lower, self.book.names)))
        svg = text.getvalue().partition("<svg")[2]
        # Two figures in one page must not share ids: clip paths and markers would take the first figure's.
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{len(self.book.names)}-", svg)
        svg = themed(re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)).strip()
        svg = f'<svg role="img" aria-label="{escape(title)}" {svg}'
        alone = svg.replace(">", f"><style>{css_variables()}</style>", 1)
        write_text(self.book.folder.parent, f"{self.book.folder.name}/{self.book.names[-1]}.svg", f"{alone}\n")
        return Card(title, Markup(svg), note, is_wide=self.figure.get_figwidth() > SIZE_INCHES[0])


class Sketchbook:
    """Makes the figures of one report, inside `report_style()`, and keeps their file names apart.

    Args:
        folder: where their SVG files go, in the folder of a run or a sweep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def new(self, size: tuple[float, float] = SIZE_INCHES, left: float = 0.6) -> Plot:
        """Return an empty figure."""
        return Plot(self, size, left)


def plain_number() -> Formatter:
    """Return a tick formatter without mathematical markup."""
    return FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"))


def needs_log_scale(values: NDArray[np.float64]) -> bool:
    """Return whether positive values span more than two decades."""
    return len(values) > 1 and bool(values.min() > SMALLEST) and bool(values.max() > 100 * values.min())


# Of an axis at most this share of the values is left out: those that are further from the others than so many times
# the length that these take.
MAX_SHARE, CRUSHING, CRUSHING_LOG = 0.25, 10.0, 5.0


@dataclass(frozen=True)
class VisibleRange:
    """What of an axis is shown, where few values are so far off that they crush all others.

    Args:
        low: the smallest value that is shown.
        high: the largest one.
        is_log: whether only a log scale shows the values between as what they are.
        is_clipped: whether some values lie outside.
    """

    low: float
    high: float
    is_log: bool
    is_clipped: bool

    def clip(self, values: ArrayLike) -> NDArray[np.float64]:
        """Return the values, those outside moved to the nearer end."""
        return np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)

    def apply(self, plot: Plot) -> None:
        """Set up the vertical axis of a figure in which everything is drawn already."""
        low, high = (np.log(self.low), np.log(self.high)) if self.is_log else (self.low, self.high)
        # A constant needs room around it; matplotlib's own margin would label it to the last digit.
        room = 0.06 * (high - low) or abs(self.low) * 0.5 or 1.0
        if self.is_clipped or self.low == self.high:
            ends = np.array([low - room, high + room])
            plot.axes.set_ylim(*(np.exp(ends) if self.is_log else ends))
        if self.is_log:
            plot.use_log_scale()

    @property
    def note(self) -> str:
        """A sentence that says so where some values lie outside."""
        return "Outliers are clipped: they are at the edge, or outside." if self.is_clipped else ""


def visible_range(values: Sequence[float]) -> VisibleRange:
    """Return what to show of finite values, at least one of them: all, unless a few crush the rest.

    Example:
        >>> visible_range([0.90, 0.91, 0.93, 1e6])
        VisibleRange(low=0.9, high=0.93, is_log=False, is_clipped=True)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    is_log = needs_log_scale(ordered)
    places = np.log10(ordered) if is_log else ordered
    # The shortest piece of the axis that has all but a share of the values.
    num = len(ordered) - max(0, min(int(MAX_SHARE * len(ordered)), len(ordered) - 2))
    lengths = places[num - 1 :] - places[: len(places) - num + 1]
    first = int(lengths.argmin())
    room = (CRUSHING_LOG if is_log else CRUSHING) * lengths[first] or np.inf
    kept = ordered[(places >= places[first] - room) & (places <= places[first + num - 1] + room)]
    return VisibleRange(float(kept[0]), float(kept[-1]), needs_log_scale(kept), len(kept) < len(ordered))
