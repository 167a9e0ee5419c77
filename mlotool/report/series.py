"""The curves of a run: metrics.csv as one series a key, grouped by what draws them."""

import csv
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import MAX_METRICS_BYTES, open_file

SPLIT_NAMES = ("train", "meta", "val", "valid", "validation", "test")
MAX_BUCKETS = 500
MAX_LINES, MAX_KEYS, MAX_LINE_LENGTH = 2_000_000, 1_000, 2_000
"""Of metrics.csv, so that a page is there in seconds."""

MAX_CHARACTERS = 100_000_000
"""Of it as well: three million usual lines."""

LARGEST_TICK = 1e15
# A larger value is as good as infinite, and its square or sum is.
LARGEST = 1e150
# A smaller one is as good as zero, and has no place on a log scale.
SMALLEST = 1e-150
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


def read_series(run_dir: Path) -> tuple[list[Series], list[str]]:
    """Read metrics.csv (tick,key,value) of a run folder.

    Returns:
        one series a key in order of appearance, and notes on what could not be read.
    """
    points: dict[str, dict[float, float]] = {}
    num_bad = num_lines = num_others = 0
    pieces = _Pieces()
    try:
        with (
            open_file(run_dir, "metrics.csv", MAX_METRICS_BYTES) as file,
            TextIOWrapper(file, encoding="utf-8", errors="replace", newline="") as text,
        ):
            for row in _rows(pieces.of(text)):
                num_lines += 1
                if num_lines > MAX_LINES:
                    break
                if row[:3] == ["tick", "key", "value"] or not row:
                    continue
                try:
                    tick, key, value = float(row[0]), row[1], float(row[2])
                except (ValueError, IndexError):
                    num_bad += 1
                    continue
                if not abs(tick) < LARGEST_TICK:
                    num_bad += 1
                elif len(points) == MAX_KEYS and key not in points:
                    num_others += 1
                else:
                    # A resumed run logs some ticks again: the later value counts.
                    points.setdefault(key, {})[tick] = value
    except FileNotFoundError:
        return [], []
    except RunFileError as error:
        return [], [str(error)]
    notes = []
    if num_bad:
        notes.append(f"metrics.csv has {num_bad} line{'s' if num_bad > 1 else ''} that could not be read.")
    if num_others:
        notes.append(f"metrics.csv has more than {MAX_KEYS} keys; {num_others} values of later ones are left out.")
    if num_lines > MAX_LINES or pieces.num_characters > MAX_CHARACTERS:
        limit = f"{MAX_LINES} lines" if num_lines > MAX_LINES else f"{MAX_CHARACTERS} characters"
        notes.append(f"metrics.csv has more than {limit}; what comes after those is left out.")
    return [_series(key, values) for key, values in points.items()], notes


class _Pieces:
    """The lines of a text, as far as they are read; a long line, which no run writes, comes in pieces."""

    def __init__(self) -> None:
        self.num_characters = 0

    def of(self, text: TextIOWrapper) -> Iterator[str]:
        """Yield them."""
        while (line := text.readline(MAX_LINE_LENGTH)) and self.num_characters <= MAX_CHARACTERS:
            self.num_characters += len(line)
            yield line


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
    return len(values) > 1 and bool(values.min() > SMALLEST) and bool(values.max() > 100 * values.min())
