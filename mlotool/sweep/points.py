"""Which points a sweep tries: every combination of a grid."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from mlotool.config.reading import read_document
from mlotool.config.run_length import has_finished, read_summary
from mlotool.config.sweep_plan import SweepPlan
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_outcome


@dataclass(frozen=True)
class Point:
    """One job to run.

    Args:
        number: the name of its folder.
        words: what it overrides beside what all jobs share.
        study: what `Watcher` takes; None where no study watches the job.
    """

    number: int
    words: tuple[str, ...]
    study: dict[str, Any] | None = None


class AbstractPoints(ABC):
    """Gives the jobs of a sweep one by one, without those that a sweep before has ended."""

    total: int
    num_ended: int

    @abstractmethod
    def next(self) -> Point | None:
        """Return the next job to run; None where all have been given."""

    @abstractmethod
    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Take in how a job ended."""


class GridPoints(AbstractPoints):
    """Every combination, in the order of the command line.

    Args:
        plan: the sweep.
        folder: its folder: jobs that ended there are not given again, but those that are to go on for longer now.
    """

    def __init__(self, plan: SweepPlan, folder: Path) -> None:
        points = list(_grid(plan))
        waiting = [each for each in points if not _has_ended(folder / str(each.number), plan.last_tick)]
        self.total, self.num_ended = len(points), len(points) - len(waiting)
        self._waiting = iter(waiting)

    def next(self) -> Point | None:
        """Return the next combination."""
        return next(self._waiting, None)

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Count it."""
        self.num_ended += outcome.status in ENDED


def _has_ended(folder: Path, last_tick: int | None) -> bool:
    status, config = read_outcome(folder).status, folder / "config.yaml"
    if status == "finished" and last_tick is not None and config.is_file():
        return has_finished(read_summary(folder), read_document(config).data, last_tick)
    return status in ENDED


def _grid(plan: SweepPlan) -> Iterator[Point]:
    values = [[f"{each.key}={choice}" for choice in each.choices] for each in plan.dimensions]
    for number, words in enumerate(product(*values)):
        yield Point(number, words)
