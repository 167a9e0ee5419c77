"""What samplers of ours have in common: a trial's values follow from the study's history, the seed and its number."""

import hashlib
import math
from abc import abstractmethod
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mlotool.core.errors import ConfigError


def countable(distribution: BaseDistribution, limit: int) -> list[Any] | None:
    """Return all values, or None where there are more than `limit`; choices are always returned.

    Example:
        >>> countable(IntDistribution(2, 8, step=2), limit=10), countable(FloatDistribution(0.0, 1.0), limit=10)
        ([2, 4, 6, 8], None)
    """
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    low, high, step = _range(distribution)
    if step is None:
        return [low] if low == high else None
    count = math.floor((high - low) / step + 1e-8) + 1
    return [_on_grid(distribution, low + step * index) for index in range(count)] if count <= limit else None


def contains(distribution: BaseDistribution, value: Any) -> bool:
    """Say whether a value of another trial, or one that was queued, may be taken."""
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except (ValueError, TypeError):
        return False


def draw(distribution: BaseDistribution, random: np.random.Generator) -> Any:
    """Return a value, all of them being as likely; of a logarithmic range, all orders of magnitude."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(random.integers(len(distribution.choices)))]
    return at(distribution, random.random())


def position(distribution: BaseDistribution, value: float) -> float:
    """Return where a number lies in its range: 0 at the lower end, 1 at the upper one, logarithmically if it is that.

    Example:
        >>> round(position(FloatDistribution(1e-3, 1e-1, log=True), 1e-2), 9)
        0.5
    """
    low, high = _ends(distribution)
    inner = math.log(value) if _is_log(distribution) else value
    return min(max((inner - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def at(distribution: BaseDistribution, where: float) -> float | int:
    """Return the value at a position between 0 and 1.

    Example:
        >>> at(IntDistribution(1, 4), 0.6)
        3
    """
    low, high = _ends(distribution)
    inner = low + (high - low) * where
    return _on_grid(distribution, math.exp(inner) if _is_log(distribution) else inner)


def _range(distribution: BaseDistribution) -> tuple[float, float, float | None]:
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high, distribution.step


def _is_log(distribution: BaseDistribution) -> bool:
    return bool(getattr(distribution, "log", False))


def _ends(distribution: BaseDistribution) -> tuple[float, float]:
    """Return the ends of the range; each value of a grid has a whole step, those at the ends too."""
    low, high, step = _range(distribution)
    low, high = (low, high) if step is None else (low - step / 2, high + step / 2)
    return (math.log(low), math.log(high)) if _is_log(distribution) else (low, high)


def _on_grid(distribution: BaseDistribution, value: float) -> float | int:
    low, high, step = _range(distribution)
    if step is not None:
        value = low + step * round((value - low) / step)
    value = min(max(value, low), high)
    return int(value) if isinstance(distribution, IntDistribution) else float(value)


Point = frozenset[tuple[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """A trial that has finished.

    Args:
        number: of the trial.
        score: its value, of which more is better; -inf where it failed.
        params: its values by name.
        distributions: what they were drawn from.
    """

    number: int
    score: float
    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]


@dataclass(frozen=True)
class History:
    """What was known when a trial began.

    Args:
        study: its name.
        outcomes: the trials that had finished, in the order in which they did.
        tried: the points of all trials with lower numbers.
    """

    study: str
    outcomes: tuple[Outcome, ...]
    tried: frozenset[Point]

    @property
    def scored(self) -> list[Outcome]:
        """Those that did not fail."""
        return [outcome for outcome in self.outcomes if outcome.score > -math.inf]


def read_history(study: Study, number: int, sampler: str) -> History:
    """Return what the study knows when trial `number` begins.

    A trial that was pruned counts with the last value that it reported, but never for better than the median of those
    that had completed before: a loss that begins to rise is pruned after its best value.

    Args:
        study: with one objective.
        number: of the trial.
        sampler: what `sweep.sampler` calls the one that asks.

    Raises:
        ConfigError: the study has several objectives.
    """
    if len(study.directions) != 1:
        raise ConfigError(
            f"sweep.sampler: found '{sampler}' with {len(study.directions)} objectives; expected one objective, or "
            "sampler=nsga2."
        )
    sign = 1.0 if study.directions[0] == StudyDirection.MAXIMIZE else -1.0
    trials = study.get_trials(deepcopy=False)
    finished = [trial for trial in trials if trial.state.is_finished() and trial.params and trial.number != number]
    outcomes: list[Outcome] = []
    completed: list[float] = []
    for trial in sorted(finished, key=lambda trial: (trial.datetime_complete or datetime.min, trial.number)):
        score = _score(trial, sign, completed)
        if trial.state == TrialState.COMPLETE:
            insort(completed, score)
        outcomes.append(Outcome(trial.number, score, trial.params, trial.distributions))
    tried = frozenset(frozenset(trial.params.items()) for trial in trials if trial.number < number)
    return History(study.study_name, tuple(outcomes), tried)


def _score(trial: FrozenTrial, sign: float, completed: list[float]) -> float:
    """Return how good a trial is; `completed` are the scores of those that completed before it, in ascending order."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        # A loss may be infinite; so far as samplers know, that is a failure.
        score = sign * trial.value
        return score if math.isfinite(score) else -math.inf
    if trial.state == TrialState.PRUNED and trial.last_step is not None:
        score = sign * trial.intermediate_values[trial.last_step]
        if math.isfinite(score):
            return min(score, completed[len(completed) // 2]) if completed else score
    return -math.inf


def generator(seed: int, number: int, *purpose: str) -> np.random.Generator:
    """Return random numbers that depend on the seed, the trial and what they are for, and on nothing that was drawn.

    Example:
        >>> generator(0, 5, "lr").random() == generator(0, 5, "lr").random()
        True
        >>> generator(0, 5, "lr").random() == generator(0, 6, "lr").random()
        False
    """
    digest = hashlib.blake2b(repr((seed, number, purpose)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest))


# How many trials may take their values by turns without reading the history again.
_NUM_TRIALS_KEPT = 16

State = TypeVar("State")


class AbstractHistorySampler(BaseSampler, Generic[State]):
    """Draws each value when it is asked for, from what a trial's beginning has made of the study's history.

    Nothing is kept but what can be computed again: another process with the same study and seed draws the same values.

    Args:
        name: what `sweep.sampler` calls it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._states: dict[tuple[str, int], State] = {}

    @abstractmethod
    def begin(self, history: History, number: int) -> State:
        """Return what the values of trial `number` are drawn from."""

    @abstractmethod
    def choose(self, state: State, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return a value; `trial.params` are those that were drawn before."""

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Forget a trial of the same number, which was another study's of this name."""
        self._states.pop((study.study_name, trial.number), None)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return nothing: which parameters a trial has is known when they are asked for."""
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return nothing, as above."""
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a parameter's value.

        Raises:
            ConfigError: the study has several objectives.
        """
        key = (study.study_name, trial.number)
        if key not in self._states:
            while len(self._states) >= _NUM_TRIALS_KEPT:
                self._states.pop(next(iter(self._states)))
            self._states[key] = self.begin(read_history(study, trial.number, self._name), trial.number)
        return self.choose(self._states[key], trial, param_name, param_distribution)


class NumberedSampler(BaseSampler):
    """Makes a sampler anew for each trial, and for each value that is drawn by itself.

    One sampler for a whole study would draw from random numbers that go on from draw to draw: another process, which
    goes on with a study, could not know how many were taken.

    Args:
        make: makes a sampler with a seed.
        seed: of the study.

    Example:
        >>> import optuna
        >>> def first(sampler):
        ...     return optuna.create_study(sampler=sampler).ask().suggest_float("lr", 0, 1)
        >>> make = lambda seed: optuna.samplers.RandomSampler(seed)
        >>> first(NumberedSampler(make, 3)) == first(NumberedSampler(make, 3))
        True
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._begun: tuple[int, BaseSampler] | None = None

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Begin a trial: one sampler finds the common search space, and draws from it."""
        self._begun = trial.number, self._made(trial)
        self._begun[1].before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return what is drawn together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of what is drawn together."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value that is drawn by itself, whatever was drawn before it: a trial that was half drawn goes on."""
        return self._made(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """Let a sampler note what a trial has found."""
        self._made(trial).after_trial(study, trial, state, values)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if self._begun is None or self._begun[0] != trial.number:
            self._begun = trial.number, self._made(trial)
        return self._begun[1]

    def _made(self, trial: FrozenTrial, *purpose: str) -> BaseSampler:
        return self._make(int(generator(self._seed, trial.number, *purpose).integers(2**32)))
