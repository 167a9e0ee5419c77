"""What the jobs of a trial have found together: the values of its objectives."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.messages import did_you_mean
from mlotool.sweep.job_folder import JobOutcome, numbers_of, read_number

DIRECTIONS = {"max": "maximize", "min": "minimize"}


@dataclass(frozen=True)
class TrialResult:
    """What the jobs of a trial have found together.

    Args:
        values: of its objectives; None where a job has none, or one that is not a number.
        is_pruned: whether a job was stopped because others did better.
        has_crashed: whether a job has failed; the others would find the same again.
    """

    values: list[float] | None
    is_pruned: bool = False
    has_crashed: bool = False


class StudyValues:
    """Gathers the objectives of the jobs of each trial; with several jobs a trial has their means.

    Args:
        plan: the sweep.

    Attributes:
        directions: of the objectives, in Optuna's words.
        repeats: jobs of a trial.
        can_be_pruned: whether a job may be stopped because others do better.

    Raises:
        ConfigError: repetitions, and a seed that is searched.
    """

    def __init__(self, plan: SweepPlan) -> None:
        settings = plan.settings
        assert plan.mode is not None
        self.repeats: int = settings["repeats"]
        self._second: str | None = settings["second_objective"]
        self.directions = [DIRECTIONS[plan.mode]]
        if self._second is not None:
            self.directions.append(DIRECTIONS[settings["second_objective_mode"]])
        self.can_be_pruned = self.repeats == 1 and self._second is None
        self._ended: dict[int, dict[int, tuple[JobOutcome, float | None]]] = {}
        if self.repeats > 1 and any(each.key == "seed" for each in plan.dimensions):
            raise ConfigError(
                f"sweep.repeats: found {self.repeats} beside a seed that is searched; expected one of the two, as each "
                "repetition has a seed of its own. Leave seed out."
            )

    def add(self, trial: int, job: int, outcome: JobOutcome, folder: Path) -> TrialResult | None:
        """Take note of a job that has ended; return the result of its trial, or None while jobs of it run.

        Args:
            trial: its number.
            job: its number.
            outcome: how it has ended.
            folder: the job's.

        Raises:
            RunError: a job that has finished has no value of the second objective.
        """
        second = None if self._second is None else read_number(folder, self._second)
        if second is None and self._second is not None and outcome.status == "finished":
            known = numbers_of(folder)
            raise RunError(
                f"sweep.second_objective: found {self._second}, which {folder} has not; expected one of "
                f"{', '.join(known) or 'the keys of its summary.json'}.{did_you_mean(self._second, known)} Start the "
                "sweep again with that key."
            )
        ended = self._ended.setdefault(trial, {})
        ended[job] = outcome, second
        if len(ended) < self.repeats:
            return None
        del self._ended[trial]
        outcomes = [each for each, _ in ended.values()]
        firsts = [each.value for each in outcomes if each.status == "finished" and each.value is not None]
        seconds = [value for _, value in ended.values() if value is not None]
        columns = [firsts] if self._second is None else [firsts, seconds]
        if all(len(column) == self.repeats for column in columns):
            means = [fmean(column) for column in columns]
            return TrialResult(None if any(map(math.isnan, means)) else means)
        statuses = {each.status for each in outcomes}
        return TrialResult(None, is_pruned="pruned" in statuses, has_crashed="failed" in statuses)
