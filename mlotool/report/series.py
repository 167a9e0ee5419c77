"""The curves of a run: metrics.csv as one series a key, grouped by what draws them."""

import csv
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPLIT_NAMES = ("train", "meta", "val", "valid", "validation", "test")
MAX_BUCKETS = 500
# A larger value is as good as infinite, and its square or sum is.
LARGEST = 1e150
MIN_POINTS_TO_SMOOTH = 40


@dataclass(frozen=True)
class Series:
    """One logged key.

    Args:
        owner: the problem, split or analysis before the slash.
        metric: what stands after it.
        ticks: increasing, [n].
        values: NaN where the value was not finite, [n].
    """

    owner: str
    metric: str
    ticks: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values that can be drawn."""
        return self.values[~np.isnan(self.values)]

    @property
    def not_finite(self) -> NDArray[np.float64]:
        """The ticks whose value cannot be drawn."""
        return self.ticks[np.isnan(self.values)]


def read_series(file: Path) -> tuple[list[Series], int]:
    """Read metrics.csv (tick,key,value).

    Returns:
        one series a key in order of appearance, and the number of lines that could not be read.
    """
    if not file.is_file():
        return [], 0
    points: dict[str, dict[float, float]] = {}
    num_bad = 0
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        for row in _rows(lines):
            if row[:3] == ["tick", "key", "value"] or not row:
                continue
            try:
                tick, key, value = float(row[0]), row[1], float(row[2])
            except (ValueError, IndexError):
                num_bad += 1
                continue
            if not math.isfinite(tick):
                num_bad += 1
                continue
            # A resumed run logs some ticks again: the later value counts.
            points.setdefault(key, {})[tick] = value
    return [_series(key, values) for key, values in points.items()], num_bad


def _rows(lines: Iterable[str]) -> Iterator[list[str]]:
    rows = csv.reader(lines)
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error:
            yield ["unreadable"]


def _series(key: str, points: dict[float, float]) -> Series:
    owner, slash, metric = key.partition("/")
    ticks = np.array(list(points), dtype=np.float64)
    values = np.array(list(points.values()), dtype=np.float64)
    order = np.argsort(ticks, kind="stable")
    values[~(np.abs(values) < LARGEST)] = np.nan
    return Series(owner if slash else "", metric if slash else key, ticks[order], values[order])


def problem_names(configured: Iterable[str], series: Iterable[Series], splits: Collection[str]) -> list[str]:
    """Return the problems of a run; without a config, the owners of metrics that are no usual split."""
    names = [str(name) for name in configured]
    if names:
        return names
    return list(dict.fromkeys(each.owner for each in series if each.owner and each.owner not in splits))


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return a centred moving mean over about a fifteenth of the curve, or None where that is too short for one."""
    if len(values) < MIN_POINTS_TO_SMOOTH:
        return None
    half = max(1, len(values) // 30)
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    num = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(num, 1)
    return np.where(num > 0, mean, np.nan)


def thinned(ticks: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return at most two points a bucket, its smallest and its largest value, so that no spike is lost."""
    if len(ticks) <= 2 * MAX_BUCKETS:
        return ticks, values
    keep: list[int] = []
    for bucket in np.array_split(np.arange(len(ticks)), MAX_BUCKETS):
        part = values[bucket]
        if np.isnan(part).all():
            keep.append(int(bucket[0]))
        else:
            keep.extend(sorted({int(bucket[np.nanargmin(part)]), int(bucket[np.nanargmax(part)])}))
    return ticks[keep], values[keep]


def needs_log_scale(values: NDArray[np.float64]) -> bool:
    """Return whether positive values span more than two decades."""
    return len(values) > 1 and bool(values.min() > 0) and bool(values.max() > 100 * values.min())
