"""What a study's earlier trials say: all that a sampler of ours knows."""

import hashlib
import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mlotool.core.errors import ConfigError

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
        return [each for each in self.outcomes if each.score > -math.inf]


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
            f"sweep.sampler: found '{sampler}' with {len(study.directions)} objectives; expected one objective, or a "
            "sampler that takes several. Write sweep.sampler=nsga2."
        )
    sign = 1.0 if study.directions[0] == StudyDirection.MAXIMIZE else -1.0
    trials = study.get_trials(deepcopy=False)
    finished = [each for each in trials if each.state.is_finished() and each.params and each.number != number]
    outcomes: list[Outcome] = []
    completed: list[float] = []
    for trial in sorted(finished, key=lambda each: (each.datetime_complete or datetime.min, each.number)):
        score = _score(trial, sign, completed)
        if trial.state == TrialState.COMPLETE:
            insort(completed, score)
        outcomes.append(Outcome(trial.number, score, trial.params, trial.distributions))
    tried = frozenset(frozenset(each.params.items()) for each in trials if each.number < number)
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
