"""groups.json in a sweep's folder: which jobs have shared a process, and so share one again when the sweep goes on.

A job among others computes what it computes alone but for the last bits, which depend on how many there are.
"""

import json
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.files import write_text
from mlotool.core.run_files import read_json
from mlotool.sweep.groups import Group, Point

FILE = "groups.json"


class GroupRecord:
    """The groups of a sweep that have begun.

    Args:
        folder: of the sweep, which may be a stranger's.
        is_resumed: whether the sweep is gone on with; of a new one no group has begun.

    Attributes:
        is_resumed: as given.

    Raises:
        ConfigError: its groups.json is not as it was written.
    """

    def __init__(self, folder: Path, *, is_resumed: bool) -> None:
        self._folder, self.is_resumed = folder, is_resumed
        self._numbers = _read(folder) if is_resumed else []
        self._known = set(self._numbers)

    def groups(self, points: Mapping[int, Point], waiting: Collection[int]) -> list[Group]:
        """Return the groups that had begun and are to go on, each with all of its jobs.

        Args:
            points: the jobs of the sweep by their numbers.
            waiting: the numbers of those that have not ended.

        Raises:
            ConfigError: a group has a job that the sweep has not.
        """
        unknown = [number for number in chain(*self._numbers) if number not in points]
        if unknown:
            raise _not_ours(self._folder, f"job {unknown[0]}, which is none of this sweep's,")
        return [
            Group(tuple(points[number] for number in numbers), frozenset(numbers) - frozenset(waiting))
            for numbers in self._numbers
            if not frozenset(numbers).isdisjoint(waiting)
        ]

    def add(self, group: Group) -> None:
        """Write down a group that begins; nothing is done for one that is there."""
        numbers = tuple(point.number for point in group.points)
        if numbers not in self._known:
            self._known.add(numbers)
            self._numbers.append(numbers)
            write_text(self._folder / FILE, json.dumps({"groups": self._numbers}) + "\n")


def _read(folder: Path) -> list[tuple[int, ...]]:
    try:
        content = read_json(folder, FILE)
    except RunFileError as error:
        raise _not_ours(folder, f"what cannot be read ({error})") from error
    if content is None:
        return []
    groups = content.get("groups")
    if not isinstance(groups, list) or not all(_is_group(each) for each in groups):
        raise _not_ours(folder, "no lists of the numbers of jobs")
    numbers = list(chain(*groups))
    if len(set(numbers)) < len(numbers):
        raise _not_ours(folder, "a job in two groups")
    return [tuple(each) for each in groups]


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(type(each) is int and each >= 0 for each in group)


def _not_ours(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"resume: found {found} in {folder / FILE}; expected the groups of jobs that this sweep has begun. Remove the "
        "file, and jobs may differ in their last bits from a sweep that went through; or leave resume out."
    )
