"""The members of `sweep=pbt`: jobs of one process, which go on together where they were stopped."""

from pathlib import Path

from mlotool.config.sweeps.population import Population, draw_population, override_words
from mlotool.config.sweeps.sweep_plan import SweepPlan
from mlotool.folders.run_folder import ENDED
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.sweep.folder import JobOutcome, read_outcome
from mlotool.sweep.points import AbstractPoints, Group, Point


class PopulationPoints(AbstractPoints):
    """One group of all members.

    Args:
        plan: the sweep.
        folder: its folder; what members have exchanged there before stays.
        is_resumed: whether the sweep is gone on with.

    Raises:
        ConfigError: there is nothing to search, or something that no run can change while it trains.
    """

    def __init__(self, plan: SweepPlan, folder: Path, *, is_resumed: bool) -> None:
        population = draw_population(plan)
        before = Population.read(SweepFolder(folder)) if is_resumed else None
        if before is not None:
            # What was drawn follows from the command; the folder may be a stranger's.
            population.ticks, population.copies = before.ticks, before.copies
        population.check()
        population.write(SweepFolder(folder))
        points = tuple(Point(number, words) for number, words in enumerate(override_words(population, plan)))
        ended = {point.number for point in points if read_outcome(folder / str(point.number)).status in ENDED}
        self.total, self.num_ended = len(points), len(ended)
        self._group = Group(points, frozenset(ended)) if len(ended) < len(points) else None

    def next(self) -> Group | None:
        """Return all members, once."""
        group, self._group = self._group, None
        return group

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Count it."""
        self.num_ended += outcome.status in ENDED
