"""Which points a sweep tries, and which of them share a process: every combination of a grid."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, product
from pathlib import Path
from typing import Any

from mlotool.config.run_config import has_finished
from mlotool.config.sweeps.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.folders.run_folder import ENDED, RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.sweep.folder import JobOutcome, read_outcome
from mlotool.sweep.study_options import num_random_trials


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

    @property
    def trained(self) -> tuple[Point, ...]:
        """The jobs that a process has, those that have ended there too."""
        return tuple(point for point in self.points if point.refused is None)


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
        self._folder, self.is_resumed = SweepFolder(folder), is_resumed
        try:
            groups = (self._folder.json(SweepFolder.GROUPS) or {"groups": []})["groups"] if is_resumed else []
            self._numbers, jobs = [*map(tuple, groups)], [*chain(*groups)]
        except (RunFileError, KeyError, TypeError) as error:
            raise self._refused("what cannot be read") from error
        if not all(groups) or not all(type(job) is int for job in jobs) or len({*jobs}) < len(jobs):
            raise self._refused("what are no numbers of jobs, each once,")

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
            raise self._refused(f"job {unknown[0]}, which is not of this sweep,")
        return [
            Group(tuple(points[number] for number in numbers), frozenset(numbers) - frozenset(waiting))
            for numbers in self._numbers
            if not frozenset(numbers).isdisjoint(waiting)
        ]

    def add(self, group: Group) -> None:
        """Write down a group that begins; nothing is done for one that is there."""
        numbers = tuple(point.number for point in group.points)
        if numbers not in self._numbers:
            self._numbers.append(numbers)
            self._folder.write_json(SweepFolder.GROUPS, {"groups": self._numbers}, indent=None)

    def _refused(self, found: str) -> ConfigError:
        return ConfigError(
            f"resume: found {found} in {self._folder.path / SweepFolder.GROUPS}; expected the groups of jobs that this "
            "sweep has begun. Remove the file (results may then differ in their last bits), or leave resume out."
        )


# Keys in which jobs may differ that run as one program: the gradients of all are one computation, and what is done
# with them is each one's own.
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

# Keys in which they may differ by numbers, of which there is one a job in that computation.
_OWN_NUMBERS = "problems.*.loss.*"

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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
    parts = [same[begin : begin + size] for same in alike.values() for begin in range(0, len(same), size)]
    groups: list[list[Point]] = []
    # Full groups first; then what is left of the structures, as far as a group has room for all of it.
    for part in sorted(parts, key=lambda part: len(part) < size):
        if not groups or len(groups[-1]) + len(part) > size:
            groups.append([])
        groups[-1] += part
    ordered = [sorted(group, key=lambda point: point.number) for group in groups]
    return [Group(tuple(group)) for group in sorted(ordered, key=lambda group: group[0].number)]


def _structure(words: Iterable[str]) -> tuple[str, ...]:
    """Return what is equal for jobs that may run as one program: words, as far as they may change the computation."""
    structure = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        # `optimizer@problems.classifier.optimizer=adam` chooses an option of a group.
        place = key.rpartition("@")[2]
        if not any(fnmatchcase(place, pattern) for pattern in _OWN):
            is_number = fnmatchcase(place, _OWN_NUMBERS) and _NUMBER.fullmatch(value)
            structure.append(f"{key}=<number>" if is_number else word)
    return tuple(structure)


class AbstractPoints(ABC):
    """Gives the jobs of a sweep, those of a process together, without those that a sweep before has ended.

    Attributes:
        total: how many jobs there are to be.
        ending: why there are fewer jobs than were asked for; empty where there are not.
        num_ended: how many jobs have ended.
        num_same: how many draws were of known points, and have no jobs of their own.
    """

    total: int
    ending: str = ""
    num_ended: int = 0
    num_same: int = 0

    @abstractmethod
    def next(self) -> Group | None:
        """Return the next jobs to run; None where all have been given."""

    @abstractmethod
    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Take in how a job ended."""


def write_plan(folder: Path, plan: SweepPlan, points: AbstractPoints | None = None) -> None:
    """Write plan.json: what the report of a sweep says of jobs that have not begun.

    Args:
        folder: of the sweep.
        plan: the sweep; of a search, the values that a key may take say nothing of how many jobs it has.
        points: its jobs, of which there may be fewer than were asked for; None where there are as many.
    """
    is_grid = plan.settings["method"] == "grid"
    keys = {
        dimension.key.lstrip("+"): {"num_values": len(dimension.choices) if is_grid else 0, "is_log": dimension.log}
        for dimension in plan.dimensions
    }
    num_jobs = plan.num_jobs if points is None else points.total
    content: dict[str, Any] = {"objective": plan.objective, "mode": plan.mode, "num_jobs": num_jobs, "keys": keys}
    if not is_grid:
        settings = plan.settings
        num_random = num_random_trials(settings["sampler"], settings["sampler_options"])
        kept = ("sampler", "repeats", "second_objective")
        content["search"] = {"num_random": num_random, **{key: settings[key] for key in kept}}
        content["search"]["second_mode"] = settings["second_objective_mode"]
        if points is not None:
            content["search"] |= {"num_same": points.num_same, "ending": points.ending}
    SweepFolder(folder).write_json(SweepFolder.PLAN, content)


class GridPoints(AbstractPoints):
    """Every combination, in the order of the command line.

    Args:
        plan: the sweep.
        folder: its folder: jobs that ended there are not given again, but those that are to go on for longer now.
        record: the groups that had begun there.

    Raises:
        ConfigError: the record is none of this sweep.
    """

    def __init__(self, plan: SweepPlan, folder: Path, record: GroupRecord) -> None:
        points = list(_grid(plan))
        waiting = {point.number for point in points if not _has_ended(folder / str(point.number), plan.last_tick)}
        self.total, self.num_ended = len(points), len(points) - len(waiting)
        begun = record.groups({point.number: point for point in points}, waiting)
        taken = {point.number for group in begun for point in group.points}
        left = [point for point in points if point.number in waiting - taken]
        groups = [*begun, *grouped(left, plan.group_size)]
        self._groups = iter(sorted(groups, key=lambda group: group.points[0].number))

    def next(self) -> Group | None:
        """Return the next combinations."""
        return next(self._groups, None)

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Count it."""
        self.num_ended += outcome.status in ENDED


def _has_ended(folder: Path, last_tick: int | None) -> bool:
    status, run = read_outcome(folder).status, RunFolder(folder)
    if status == "finished" and last_tick is not None and (config := run.config()) is not None:
        return has_finished(run.summary(), config.data, last_tick)
    return status in ENDED


def _grid(plan: SweepPlan) -> Iterator[Point]:
    values = [[f"{dimension.key}={choice}" for choice in dimension.choices] for dimension in plan.dimensions]
    for number, words in enumerate(product(*values)):
        yield Point(number, words)
