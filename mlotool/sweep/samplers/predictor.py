"""A learned performance predictor: Bayesian regression on decisions, by Thompson sampling."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from mlotool.sweep.samplers.base import AbstractHistorySampler, check_whole
from mlotool.sweep.samplers.features import Array, Space, candidates
from mlotool.sweep.samplers.history import History, Outcome, Point, generator
from mlotool.sweep.samplers.pairwise_model import Weights, draw_weights, normal_scores
from mlotool.sweep.samplers.values import draw


@dataclass(frozen=True)
class Prediction:
    """What a trial believes of the objective.

    Args:
        space: the parameters of earlier trials.
        weights: drawn from the posterior.
        options: of each parameter the features of some of its values, (num_values, num_features).
        company: by parameter and choice, the names of all parameters that trials with it had; by None for any value.
        tried: points that are not to be tried again.
    """

    space: Space
    weights: Weights
    options: dict[str, Array]
    company: dict[tuple[str, Any], frozenset[str]]
    tried: frozenset[Point]


class PredictorSampler(AbstractHistorySampler[Prediction | None]):
    """Thompson sampling by a linear model of decisions and of pairs of decisions.

    A trial draws the model's weights from their posterior, given all trials that have finished: a function of which it
    is to find the largest value. It does so value by value: of those of a parameter it takes the one with the largest
    sum of its own term, its pairs with the values taken before, and, for each parameter that is still to come, that
    one's largest term and pairs, where parameters to come are those that trials with this value had. A value that would
    end at a point that was tried is not taken while there are others.

    The model learns from ranks of values. Trials that failed are left out.

    Args:
        num_startup_trials: trials that have to finish before the model is used; until then values are random.
        max_trials: at most that many are learned from: the better and the newer ones, half of each. It bounds the time
            of a draw, which grows with the cube of their number.
        seed: of the random numbers.

    Raises:
        ConfigError: an option is out of its range.

    Example:
        >>> import optuna
        >>> study = optuna.create_study(sampler=PredictorSampler())
        >>> study.optimize(lambda trial: sum(trial.suggest_int(name, 0, 5) for name in "abcd"), n_trials=30)
        >>> study.best_value
        0.0

    Source: White, Neiswanger, Savani, "BANANAS: Bayesian Optimization with Neural Architectures for Neural Architecture
    Search", 2021, for predictors with Thompson sampling (there of networks); Baptista, Poloczek, "Bayesian Optimization
    of Combinatorial Structures", 2018, for Bayesian linear regression with pairs.
    """

    def __init__(self, num_startup_trials: int = 10, max_trials: int = 250, seed: int = 0) -> None:
        check_whole("num_startup_trials", num_startup_trials, 2)
        check_whole("max_trials", max_trials, 2)
        super().__init__("predictor")
        self._num_startup_trials, self._max_trials, self._seed = num_startup_trials, max_trials, seed

    def begin(self, history: History, number: int) -> Prediction | None:
        """Return what the values of a trial are judged by, or None for random ones."""
        if len(history.scored) < self._num_startup_trials:
            return None
        outcomes = _learned_from(history.scored, self._max_trials)
        space, random = Space(outcomes), generator(self._seed, number, "weights")
        features = space.features([each.params for each in outcomes])
        weights = draw_weights(features, space.groups, normal_scores([each.score for each in outcomes]), random)
        options = {name: parameter.options(random) for name, parameter in space.parameters.items()}
        return Prediction(space, weights, options, _company(outcomes), history.tried)

    def choose(self, state: Prediction | None, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return the value that promises most."""
        random = generator(self._seed, trial.number, "value", name)
        if state is None or name not in state.space.parameters:
            return draw(distribution, random)
        values = candidates(distribution, random)
        taken = frozenset(trial.params.items())
        untried = [each for each in values if taken | {(name, each)} not in state.tried]
        values = untried or values
        return values[int(np.argmax(_promises(state, trial, name, distribution, values)))]


def _promises(
    state: Prediction, trial: FrozenTrial, name: str, distribution: BaseDistribution, values: list[Any]
) -> Array:
    """Return how good the best point may be with each of a parameter's values."""
    parameters, weights = state.space.parameters, state.weights
    # The slope of the function at what was taken: what each feature adds.
    slope = weights.first + weights.second @ state.space.features([trial.params])[0]
    own = parameters[name].columns
    features = parameters[name].features(values)
    promises = features @ slope[own]
    anyone = state.company[name, None]
    company = [state.company.get((name, _choice(distribution, each)), anyone) for each in values]
    slopes = slope + features @ weights.second[own]
    for other in sorted(frozenset().union(*company) - trial.params.keys() - {name}):
        gains = slopes[:, parameters[other].columns] @ state.options[other].T
        promises += gains.max(axis=1) * [other in each for each in company]
    return promises


def _company(outcomes: list[Outcome]) -> dict[tuple[str, Any], frozenset[str]]:
    kinds: dict[tuple[str, ...], int] = {}
    found: dict[tuple[str, Any], set[int]] = defaultdict(set)
    for outcome in outcomes:
        kind = kinds.setdefault(tuple(outcome.params), len(kinds))
        for name, value in outcome.params.items():
            found[name, None].add(kind)
            found[name, _choice(outcome.distributions[name], value)].add(kind)
    names = list(kinds)
    return {key: frozenset().union(*(names[each] for each in numbers)) for key, numbers in found.items()}


def _choice(distribution: BaseDistribution, value: Any) -> Any:
    return (type(value), value) if isinstance(distribution, CategoricalDistribution) else None


def _learned_from(outcomes: list[Outcome], count: int) -> list[Outcome]:
    if len(outcomes) <= count:
        return outcomes
    newest = outcomes[-(count // 2) :]
    others = sorted(outcomes[: -(count // 2)], key=lambda each: each.score)
    return others[-(count - count // 2) :] + newest
