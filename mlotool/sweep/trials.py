"""What a trial of a study says: its values and decisions, as words of a job, and whether it repeats another one."""

import json
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mlotool.config.run_config import decision_faults
from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError, MlotoolError, RunError
from mlotool.sweep.storage import import_optuna


def ask(study: Any, distributions: dict[str, Any]) -> Any:
    """Return the next trial, a queued one first, with a value from each distribution."""
    trial = study.ask()
    for name, distribution in distributions.items():
        _suggest(trial, name, distribution)
    return trial


def _suggest(trial: Any, name: str, distribution: Any) -> Any:
    """Return a trial's value; where it was queued with one that is none of the distribution, that is drawn instead."""
    from mlotool.sweep.samplers.base import contains

    queued = trial._fixed_params
    if name in queued and not contains(distribution, queued[name]):
        warnings.warn(
            f"trial {trial.number} was queued with {name}={str(queued.pop(name))[:100]}, which this sweep does not "
            "have; the value is drawn instead.",
            stacklevel=2,
        )
    # `study.ask(distributions)` does the same.
    return trial._suggest(name, distribution)


PREFIX = "decisions."
DRAWN, INFEASIBLE, _UNASKED = "drawn", "infeasible", "unasked"
MAX_REASON = 2_000
_OTHER_VALUES = ("null", "true", "false", "nan", "inf")
"""Words that are no text to Hydra."""


def make_all(trial: Any, draw: Any, words: Sequence[str], storing: Any) -> None:
    """Ask a trial for all decisions of its models, and note which of the recipe's they do not ask for.

    Args:
        trial: of Optuna.
        draw: asks for them, as the models are built.
        words: of the job.
        storing: wraps what writes into the study, as what builds the models takes errors that are not ours for theirs.
    """
    drawn = draw(words, storing(partial(suggest, trial, {})))
    unasked = [name for name, value in drawn.items() if value is None]
    if unasked != _unasked(trial):
        storing(trial.set_user_attr)(_UNASKED, unasked)


def suggest(trial: Any, decided: dict[str, Any], name: str, candidates: tuple[Any, ...]) -> Any:
    """Ask a trial for a decision; asked again, it answers the same.

    Args:
        trial: of Optuna.
        decided: what it has answered.
        name: of the decision.
        candidates: names, or whole numbers; those of a range are drawn as numbers, so that their count may change.

    Raises:
        RunError: the decision had other names to choose from in an earlier trial.
    """
    if name not in decided:
        kinds, whole = import_optuna().distributions, all(type(each) is int for each in candidates)
        if whole and candidates == tuple(range(candidates[0], candidates[-1] + 1)):
            distribution = kinds.IntDistribution(candidates[0], candidates[-1])
        else:
            distribution = kinds.CategoricalDistribution(candidates)
        try:
            decided[name] = _suggest(trial, f"{PREFIX}{name}", distribution)
        except MlotoolError:
            raise
        except ValueError as error:
            raise RunError(
                f"decisions.{name}: found the candidates {', '.join(map(str, candidates))[:300]}, others than in an "
                f"earlier trial of the sweep ({error}); expected the same names each time. Where they change, put "
                "what they depend on into its name, choose(f'extra_{depth}', ..), or let it decide by a whole number, "
                "choose(name, range(n)). What has been trained is kept: correct it, and go on by the same command with "
                "resume=auto."
            ) from error
    return decided[name]


def words_of(trial: Any, without: Container[str] = ()) -> tuple[str, ...]:
    """Return the decisions of a trial as overrides, but for some keys; those that it does not ask for are taken out."""
    made = (f"{key}={_word(value)}" for key, value in _decisions(trial) if key not in without)
    return (*made, *(f"~{PREFIX}{name}" for name in _unasked(trial)))


def is_drawn(trial: Any, has_decisions: bool) -> bool:
    """Say whether a trial has all of its decisions."""
    return not has_decisions or trial.user_attrs.get(DRAWN) is True


def reason_of(trial: Any) -> str | None:
    """Return why a trial's decisions make no model; None where they make one."""
    return str(trial.user_attrs[INFEASIBLE])[:MAX_REASON] if INFEASIBLE in trial.user_attrs else None


def _decisions(trial: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in trial.params.items() if key.startswith(PREFIX))


def _unasked(trial: Any) -> list[str]:
    names = trial.user_attrs.get(_UNASKED, [])
    return [str(name) for name in names] if isinstance(names, list) else []


def _word(value: Any) -> str:
    """Return a name as a word of Hydra's that is this text and nothing else."""
    is_plain = type(value) is int or (str(value)[:1].isalpha() and value not in _OTHER_VALUES)
    return str(value) if is_plain else json.dumps(value)


def distributions_of(plan: SweepPlan) -> dict[str, Any]:
    """Return what the value of each key of a sweep is drawn from.

    Raises:
        ConfigError: an interval of real numbers, of which each value is to be tried.
    """
    for dimension in plan.dimensions if plan.settings["sampler"] == "brute_force" else ():
        if dimension.low is not None and not dimension.whole and dimension.step is None:
            raise ConfigError(
                f"{dimension.key}: found an interval with sweep.sampler=brute_force, which tries every value; expected "
                f"choices, or a range with a step. Write {dimension.key}=0.01,0.1, or choose another sampler."
            )
    return {dimension.key: _distribution(dimension) for dimension in plan.dimensions}


def check_values(trial: Any, distributions: Mapping[str, Any]) -> None:
    """Refuse values that the command line does not have, and decisions that are none: they become words of a job's.

    Raises:
        ValueError: with what is wrong.
    """
    for key, distribution in distributions.items():
        if not isinstance(trial.number, int) or trial.distributions[key] != distribution:
            raise ValueError(f"its trial {trial.number} draws {key} from {trial.distributions[key]}"[:300])
        value = distribution.to_internal_repr(trial.params[key])
        if not distribution._contains(value) or trial.params[key] != distribution.to_external_repr(value):
            raise ValueError(f"its trial {trial.number} has {key}={trial.params[key]!r}"[:300])
    decisions = {key.removeprefix(PREFIX): value for key, value in _decisions(trial)}
    faults = list(decision_faults({"decisions": {**dict.fromkeys(_unasked(trial), 0), **decisions}}))
    if faults:
        raise ValueError(f"its trial {trial.number}: {faults[0]}"[:300])


def _distribution(dimension: Dimension) -> Any:
    kinds = import_optuna().distributions
    if dimension.low is None or dimension.high is None:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.whole:
        step = int(dimension.step or 1)
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


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
        self._study, self._states = study, optuna.trial.TrialState
        self._first: dict[Point, int] = {}
        self._waiting: dict[int, list[int]] = {}

    def first(self, trial: Any) -> int | None:
        """Return the number of the trial that has jobs of this one's point; None where there is none."""
        return self._first.get(_point(trial))

    def add(self, trial: Any) -> None:
        """Take note of a trial that has jobs of its own; one whose job has crashed may be tried again."""
        if not self._has_crashed(self._trial(trial.number)):
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
        if not is_copy(trial):
            return False
        first = trial.user_attrs[_SAME]
        if type(first) is not int or not 0 <= first < trial.number:
            raise ValueError(f"its trial {trial.number} has the point of trial {first!r}"[:300])
        if not trial.state.is_finished():
            self.repeat(trial.number, first)
        return True

    def pass_on(self, number: int) -> None:
        """Give the result of a trial to those that wait for it, if it has ended.

        Values that it reported while it ran are left out, as pruners would compare jobs with each copy of them. The
        last value of a pruned trial is copied: samplers (TPE, CMA-ES, ours) read it as its result, and pruners look at
        no pruned trial.
        """
        first = self._trial(number)
        if not first.state.is_finished():
            return
        if self._has_crashed(first):
            self._first.pop(_point(first), None)
        for copy in self._waiting.pop(number, []):
            if first.state == self._states.COMPLETE:
                self._study.tell(copy, first.values)
                continue
            if first.state == self._states.PRUNED and first.last_step is not None:
                last, identity = first.intermediate_values[first.last_step], self._trial(copy)._trial_id
                self._study._storage.set_trial_intermediate_value(identity, first.last_step, last)
            self._study.tell(copy, state=first.state)

    def _trial(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]

    def _set_attribute(self, number: int, key: str, value: Any) -> None:
        # An `optuna.Trial` can do it too, but to make one draws from the sampler, of which some keep count.
        self._study._storage.set_trial_user_attr(self._trial(number)._trial_id, key, value)

    def _has_crashed(self, trial: Any) -> bool:
        is_known = reason_of(trial) is not None or _NO_VALUE in trial.user_attrs
        return trial.state == self._states.FAIL and not is_known


def is_copy(trial: Any) -> bool:
    """Say whether a trial has the point of another one, and so no job of its own."""
    return _SAME in trial.user_attrs


def _point(trial: Any) -> Point:
    return frozenset(trial.params.items())
