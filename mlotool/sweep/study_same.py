"""Trials with the point of a trial before: they are told what that one has found, and no job is trained for them."""

import warnings
from typing import Any

from mlotool.sweep.study_decisions import is_infeasible

Point = frozenset[tuple[str, Any]]

MOST_IN_A_ROW = 100
"""Draws, one after the other, of points that there were, after which a sampler is taken to have no others."""

_SAME = "same_as_trial"


class SamePoints:
    """Knows the points of a study that have jobs, and the trials that wait for what those will find.

    A run is deterministic: with the same values and the same seed it would find the same again. The sampler's history
    is as if it had.

    Args:
        optuna: the package.
        study: its study, whose trials have the numbers of their places.
    """

    def __init__(self, optuna: Any, study: Any) -> None:
        self._optuna, self._study, self._states = optuna, study, optuna.trial.TrialState
        self._first: dict[Point, int] = {}
        self._waiting: dict[int, list[Any]] = {}

    def first(self, trial: Any) -> int | None:
        """Return the number of the trial that has jobs of this one's point; None where there is none."""
        return self._first.get(_point(trial))

    def add(self, trial: Any) -> None:
        """Take note of a trial that has jobs of its own."""
        self._first.setdefault(_point(trial), trial.number)

    def repeat(self, number: int, first: int) -> None:
        """Tell a trial what the first one of its point has found, or will have found when it ends."""
        trial = self._optuna.trial.Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
        trial.set_user_attr(_SAME, first)
        self._waiting.setdefault(first, []).append(trial)
        self.told(first)

    def take_up(self, trial: Any) -> bool:
        """Say whether a trial of an earlier process has the point of another one, for which it then waits again.

        Raises:
            ValueError: there is no such other trial.
        """
        first = trial.user_attrs.get(_SAME)
        if first is None:
            return False
        if type(first) is not int or not 0 <= first < trial.number:
            raise ValueError(f"its trial {trial.number} has the point of trial {first!r}"[:300])
        if not trial.state.is_finished():
            self.repeat(trial.number, first)
        return True

    def told(self, first: int) -> None:
        """Tell those that wait for a trial what it has found, if it has ended; one that failed may be tried again."""
        found = self._study.get_trials(deepcopy=False)[first]
        if not found.state.is_finished():
            return
        if found.state == self._states.FAIL and not is_infeasible(found):
            self._first.pop(_point(found), None)
        for trial in self._waiting.pop(first, []):
            self._tell(trial, found)

    def _tell(self, trial: Any, found: Any) -> None:
        with warnings.catch_warnings():
            # A process that was killed may have reported some of them.
            warnings.filterwarnings("ignore", message=".*reported value is ignored.*")
            for step, value in found.intermediate_values.items():
                trial.report(value, step)
        if found.state == self._states.COMPLETE:
            self._study.tell(trial.number, found.values)
        else:
            self._study.tell(trial.number, state=found.state)


def _point(trial: Any) -> Point:
    return frozenset(trial.params.items())
