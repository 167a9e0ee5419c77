"""metrics.csv: a line `tick,key,value` for each logged number, appended while a run goes on."""

import csv
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from mlotool.folders.files import replacing, writing

HEADER = ("tick", "key", "value")
LARGEST_TICK = 1e15
SECONDS_BETWEEN_FLUSHES = 1.0


class MetricsFile:
    """Appends to metrics.csv.

    Args:
        path: of the file; a new one gets a header.
        position: bytes of it to keep, where a run goes on from a checkpoint: what came after will come again.

    Raises:
        WriteError: the disk does not take it; from the other methods, too.
    """

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._path, self._flushed_at = path, float("-inf")
        if position is not None:
            _cut(path, position)
        with writing(path):
            is_new = not path.exists() or path.stat().st_size == 0
            self._file: TextIO = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if is_new:
            self._writer.writerow(HEADER)

    def append(self, tick: int, values: Mapping[str, float]) -> None:
        """Write a line for each value."""
        # Nine digits give a float32 back exactly.
        with writing(self._path):
            self._writer.writerows((tick, key, f"{value:.9g}") for key, value in values.items())
        if time.monotonic() - self._flushed_at >= SECONDS_BETWEEN_FLUSHES:
            self._flush()

    def _flush(self) -> None:
        with writing(self._path):
            self._file.flush()
        self._flushed_at = time.monotonic()

    def position(self) -> int:
        """Return the length in bytes, once all of it is on the disk."""
        self._flush()
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


def _cut(path: Path, position: int) -> None:
    """Keep the first bytes of a file, in a file of its own: what has another link keeps its content there."""
    size = path.stat().st_size if path.exists() else 0
    if size < position:
        warnings.warn(
            f"{path} has {size} bytes, but had {position} when the checkpoint was written; expected the file of the "
            "run. Copy it from where the run was, or go on without the missing lines.",
            stacklevel=4,
        )
    if path.exists():
        with replacing(path) as temporary:
            shutil.copyfile(path, temporary)
            os.truncate(temporary, min(size, position))


def read_points(lines: Iterable[str], max_keys: int) -> tuple[dict[str, dict[float, float]], int]:
    """Return the values by key and tick, and how many lines are none that a run writes.

    Args:
        lines: of metrics.csv.
        max_keys: lines of more keys are left out, and counted.
    """
    points: dict[str, dict[float, float]] = {}
    num_bad = 0
    for line in lines:
        first, _, rest = line.partition(",")
        key, _, last = rest.rpartition(",")
        try:
            tick, value = float(first), float(last)
        except ValueError:
            num_bad += line not in ("", ",".join(HEADER))
            continue
        key = key.strip('"').replace('""', '"')
        if abs(tick) < LARGEST_TICK and (key in points or len(points) < max_keys):
            # A resumed run logs some ticks again: the later value counts.
            points.setdefault(key, {})[tick] = value
        else:
            num_bad += 1
    return points, num_bad
