"""Which points a sweep tries, and which of them share a process: every combination of a grid."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from mlotool.config.reading import read_document
from mlotool.config.run_config import has_finished, read_summary
from mlotool.config.sweep_plan import SweepPlan
from mlotool.sweep.group_record import GroupRecord
from mlotool.sweep.groups import Group, Point, grouped
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_outcome


class AbstractPoints(ABC):
    """Gives the jobs of a sweep, those of a process together, without those that a sweep before has ended.

    Attributes:
        total: how many jobs there are to be.
        ending: why there are fewer jobs than were asked for; empty where there are not.
    """

    total: int
    ending: str = ""

    @property
    @abstractmethod
    def num_ended(self) -> int:
        """How many jobs have ended."""

    @property
    @abstractmethod
    def num_same(self) -> int:
        """How many draws were of known points, and have no jobs of their own."""

    @abstractmethod
    def next(self) -> Group | None:
        """Return the next jobs to run; None where all have been given."""

    @abstractmethod
    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Take in how a job ended."""


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
        waiting = {each.number for each in points if not _has_ended(folder / str(each.number), plan.last_tick)}
        self.total, self._num_ended = len(points), len(points) - len(waiting)
        begun = record.groups({each.number: each for each in points}, waiting)
        taken = {point.number for group in begun for point in group.points}
        left = [each for each in points if each.number in waiting - taken]
        groups = [*begun, *grouped(left, plan.group_size)]
        self._groups = iter(sorted(groups, key=lambda group: group.points[0].number))

    @property
    def num_ended(self) -> int:
        """How many jobs have ended."""
        return self._num_ended

    @property
    def num_same(self) -> int:
        """None: each combination is one point."""
        return 0

    def next(self) -> Group | None:
        """Return the next combinations."""
        return next(self._groups, None)

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Count it."""
        self._num_ended += outcome.status in ENDED


def _has_ended(folder: Path, last_tick: int | None) -> bool:
    status, config = read_outcome(folder).status, folder / "config.yaml"
    if status == "finished" and last_tick is not None and config.is_file():
        return has_finished(read_summary(folder), read_document(config).data, last_tick)
    return status in ENDED


def _grid(plan: SweepPlan) -> Iterator[Point]:
    values = [[f"{each.key}={choice}" for choice in each.choices] for each in plan.dimensions]
    for number, words in enumerate(product(*values)):
        yield Point(number, words)
