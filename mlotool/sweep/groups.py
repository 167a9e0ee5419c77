"""Which jobs of a sweep share a process: those whose programs may run as one come together."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_OWN = (
    "seed",
    "*.seed",
    "problems.*.optimizer",
    "problems.*.optimizer.*",
    "problems.*.scheduler*",
    "problems.*.gradient_clip_norm",
    "runner.max_ticks",
    "runner.early_stopping_patience",
    "debug.limit_ticks",
)
"""Keys in which jobs may differ that run as one program: the gradients of all are one computation, and what is done
with them is each one's own."""

_OWN_NUMBERS = "problems.*.loss.*"
"""Keys in which they may differ by numbers, of which there is one a job in that computation."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Point:
    """One job to run.

    Args:
        number: the name of its folder.
        words: what it overrides beside what all jobs share.
        study: what `Watcher` takes; None where no study watches the job.
        refused: why it is not run: its decisions make no model; None where it is.
    """

    number: int
    words: tuple[str, ...]
    study: dict[str, Any] | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Group:
    """The jobs of one process.

    Args:
        points: in the order that their process has them in, each time that it is started.
        ended: the numbers of those that an earlier process has ended; they keep their places.
    """

    points: tuple[Point, ...]
    ended: frozenset[int] = frozenset()

    @property
    def waiting(self) -> list[Point]:
        """The jobs that are to run."""
        return [point for point in self.points if point.number not in self.ended]


def grouped(points: Iterable[Point], size: int) -> list[Group]:
    """Divide jobs into groups, of those that may run as one program as many as there is room for in each.

    Args:
        points: the jobs.
        size: how many a group has at most.

    Returns:
        The groups, in the order of their first jobs.

    Example:
        >>> points = [Point(number, (f"seed={number % 3}", f"data={number // 3}")) for number in range(6)]
        >>> [[point.number for point in group.points] for group in grouped(points, 4)]
        [[0, 1, 2], [3, 4, 5]]
    """
    alike: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        alike.setdefault(_structure(point.words), []).append(point)
    full: list[list[Point]] = []
    rests: list[list[Point]] = []
    for each in alike.values():
        parts = [each[begin : begin + size] for begin in range(0, len(each), size)]
        rests += [part for part in parts if len(part) < size]
        full += [part for part in parts if len(part) == size]
    ordered = (sorted(each, key=lambda point: point.number) for each in [*full, *_packed(rests, size)])
    return [Group(tuple(each)) for each in sorted(ordered, key=lambda group: group[0].number)]


def _packed(parts: Sequence[list[Point]], size: int) -> list[list[Point]]:
    """Put each part into the first group that has room for all of it."""
    groups: list[list[Point]] = []
    # The number of jobs that there is room for, and the first group with as much: not all are asked for each part.
    first_with = dict.fromkeys(range(1, size + 1), 0)
    for part in parts:
        place = first_with[len(part)]
        while place < len(groups) and len(groups[place]) + len(part) > size:
            place += 1
        first_with[len(part)] = place
        if place == len(groups):
            groups.append([])
        groups[place].extend(part)
    return groups


def _structure(words: Iterable[str]) -> tuple[str, ...]:
    """Return what is equal for jobs that may run as one program."""
    return tuple(filter(None, map(_structural, words)))


def _structural(word: str) -> str:
    """Return a word as far as it may change the computation; empty where it does not."""
    key, _, value = word.lstrip("+").partition("=")
    # `optimizer@problems.classifier.optimizer=adam` chooses an option of a group.
    place = key.rpartition("@")[2]
    if any(fnmatchcase(place, pattern) for pattern in _OWN):
        return ""
    if fnmatchcase(place, _OWN_NUMBERS) and _NUMBER.fullmatch(value):
        return f"{key}=<number>"
    return word
