"""Trials with the point of an earlier trial: they get its result, and no job is trained for them."""

from typing import Any

from mlotool.sweep.study_decisions import is_infeasible

Point = frozenset[tuple[str, Any]]

MOST_IN_A_ROW = 100
"""A sampler that has drawn so many known points in a row is taken to have no others."""

_SAME, _NO_VALUE = "same_as_trial", "has_no_value"


class SamePoints:
    """Knows which points of a study have jobs, and which trials wait for the results of those jobs.

    A run is deterministic: with the same values and the same seed it has the same result. The sampler's history is as
    if each trial had been trained.

    Args:
        optuna: the package.
        study: its study, whose trials have the numbers of their places.
    """

    def __init__(self, optuna: Any, study: Any) -> None:
        self._optuna, self._study, self._states = optuna, study, optuna.trial.TrialState
        self._first: dict[Point, int] = {}
        self._waiting: dict[int, list[int]] = {}

    def first(self, trial: Any) -> int | None:
        """Return the number of the trial that has jobs of this one's point; None where there is none."""
        return self._first.get(_point(trial))

    def add(self, trial: Any) -> None:
        """Take note of a trial that has jobs of its own; one whose job has crashed may be tried again."""
        if not self._has_crashed(self._study.get_trials(deepcopy=False)[trial.number]):
            self._first.setdefault(_point(trial), trial.number)

    def note_no_value(self, number: int) -> None:
        """Take note that the jobs of a trial have ended without a value, as they would again: they diverged."""
        self._set_attribute(number, _NO_VALUE, True)

    def repeat(self, number: int, first: int) -> None:
        """Give a trial the result of the first one of its point, as soon as there is one."""
        self._set_attribute(number, _SAME, first)
        self._waiting.setdefault(first, []).append(number)
        self.pass_on(first)

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

    def pass_on(self, first: int) -> None:
        """Give the result of a trial to those that wait for it, if it has ended."""
        found = self._study.get_trials(deepcopy=False)[first]
        if not found.state.is_finished():
            return
        if self._has_crashed(found):
            self._first.pop(_point(found), None)
        for number in self._waiting.pop(first, []):
            self._copy_result(number, found)

    def _set_attribute(self, number: int, key: str, value: Any) -> None:
        # An `optuna.Trial` can do it too, but to make one draws from the sampler, of which some keep count.
        self._study._storage.set_trial_user_attr(self._trial_id(number), key, value)

    def _trial_id(self, number: int) -> int:
        found: int = self._study.get_trials(deepcopy=False)[number]._trial_id
        return found

    def _has_crashed(self, found: Any) -> bool:
        is_known = is_infeasible(found) or _NO_VALUE in found.user_attrs
        return found.state == self._states.FAIL and not is_known

    def _copy_result(self, number: int, found: Any) -> None:
        """Give a trial the result of another one.

        Values that the other one reported while it ran are left out, as pruners would compare jobs with each copy of
        them. The last value of a pruned trial is copied: samplers (TPE, CMA-ES, ours) read it as its result, and
        pruners look at no pruned trial.
        """
        if found.state == self._states.COMPLETE:
            self._study.tell(number, found.values)
            return
        if found.state == self._states.PRUNED and found.last_step is not None:
            last = found.intermediate_values[found.last_step]
            self._study._storage.set_trial_intermediate_value(self._trial_id(number), found.last_step, last)
        self._study.tell(number, state=found.state)


def is_copy(trial: Any) -> bool:
    """Say whether a trial has the point of another one, and so no job of its own."""
    return _SAME in trial.user_attrs


def _point(trial: Any) -> Point:
    return frozenset(trial.params.items())
