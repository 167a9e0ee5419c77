"""The part of an axis that is shown, where few values are so far off that they crush all others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray

from mlotool.report.figure import use_log_scale
from mlotool.report.formats import number
from mlotool.report.series import needs_log_scale

# What is left out is at most this share of the values, and makes the axis at least so many times as long.
MAX_SHARE = 0.25
CRUSHING = 10.0
CRUSHING_LOG = 5.0


@dataclass(frozen=True)
class VisibleRange:
    """What of an axis is shown.

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

    def apply(self, axes: Axes) -> None:
        """Set up the vertical axis of a figure in which everything is drawn already."""
        if self.is_clipped:
            share = 0.06
            if self.is_log:
                room = (self.high / self.low) ** share
                axes.set_ylim(self.low / room, self.high * room)
            else:
                room = share * (self.high - self.low)
                axes.set_ylim(self.low - room, self.high + room)
        elif self.low == self.high:
            # A constant needs room around it; matplotlib's own margin would label it to the last digit.
            room = abs(self.low) * 0.5 or 1.0
            axes.set_ylim(self.low - room, self.low + room)
        if self.is_log:
            use_log_scale(axes, "y")

    def note(self, names: Sequence[str], values: Sequence[float], what: str = "job") -> str:
        """Return a sentence that names what lies outside; empty where nothing does.

        Args:
            names: of whom the values are.
            values: the most distant one of each.
            what: a name is of.
        """
        outside = [
            f"{what} {name} ({number(value)})"
            for name, value in zip(names, values, strict=True)
            if not self.low <= value <= self.high
        ]
        if not outside:
            return ""
        more = f" and {len(outside) - 4} more" if len(outside) > 4 else ""
        return f"The axis is clipped: outside it lie{'s' if len(outside) == 1 else ''} {', '.join(outside[:4])}{more}."


def visible_range(values: Sequence[float]) -> VisibleRange:
    """Return what to show of finite values, at least one of them: all, unless a few crush the rest.

    Example:
        >>> visible_range([0.90, 0.91, 0.93, 1e6])
        VisibleRange(low=0.9, high=0.93, is_log=False, is_clipped=True)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    is_log = needs_log_scale(ordered)
    scaled = np.log10(ordered) if is_log else ordered
    first, last = _kept(scaled, CRUSHING_LOG if is_log else CRUSHING)
    kept = ordered[first : last + 1]
    return VisibleRange(float(kept[0]), float(kept[-1]), needs_log_scale(kept), len(kept) < len(ordered))


def _kept(ordered: NDArray[np.float64], crushing: float) -> tuple[int, int]:
    """Return the first and the last index that are shown."""
    first, last = 0, len(ordered) - 1
    may_leave = int(MAX_SHARE * len(ordered))
    best = (first, last)
    while may_leave and last - first >= 2:
        # The end that is further from the middle goes first.
        middle = ordered[(first + last) // 2]
        if ordered[last] - middle >= middle - ordered[first]:
            last -= 1
        else:
            first += 1
        may_leave -= 1
        rest, whole = ordered[last] - ordered[first], ordered[best[1]] - ordered[best[0]]
        if rest > 0 and whole > crushing * rest:
            best = (first, last)
    return best
