"""A learned performance predictor: Bayesian regression on decisions, by Thompson sampling."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from mlotool.core.settings import Seed, checked
from mlotool.sweep.samplers import base
from mlotool.sweep.samplers.base import AbstractHistorySampler, History, Outcome, Point

Array = NDArray[np.float64]


# How much of the prior variance of a point's value the pairs may have.
_PAIR_SHARES = (0.05, 0.2, 0.5)
# Variances of the noise, beside a prior variance of 1.
_NOISES = (1e-3, 1e-2, 1e-1, 1.0)
# Trials by which these two are chosen, the last ones.
_MOST_FOR_EVIDENCE = 100


@dataclass(frozen=True)
class Weights:
    """A function of a point's features `x`: `constant + first . x + x . second x / 2`.

    Args:
        constant: a number.
        first: of shape (num_features,).
        second: of shape (num_features, num_features), symmetric; zero between features of one parameter.
    """

    constant: float
    first: Array
    second: Array


def normal_scores(scores: Sequence[float]) -> Array:
    """Return quantiles of the normal distribution by rank: of equal scores the mean, of a run that diverged no outlier.

    Args:
        scores: as many as trials.

    Returns:
        Of shape (num_trials,).

    Example:
        >>> normal_scores([0.1, 1e9, 0.2]).round(2).tolist()
        [-0.97, 0.97, 0.0]
    """
    _, inverse, counts = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles = (ends - (counts - 1) / 2 - 0.5) / len(scores)
    return np.array([NormalDist().inv_cdf(middle) for middle in middles])[inverse]


def draw_weights(features: Array, groups: NDArray[np.int64], targets: Array, random: np.random.Generator) -> Weights:
    """Return weights drawn from the posterior of `y = b + sum_i w_i x_i + sum_(i < j) v_ij x_i x_j + noise`.

    Products of features of one parameter are left out. The prior is normal; the share of the pairs in its variance and
    the noise are those of the largest marginal likelihood of the last trials, on a small grid. A draw is one of the
    prior that is corrected where there is data (Matheron's rule), so that pairs cost no more than products of matrices.

    Args:
        features: of shape (num_trials, num_features).
        groups: of shape (num_features,): the number of the parameter whose feature it is.
        targets: of shape (num_trials,), of about unit variance.
        random: what is drawn with.

    Cost: `O(num_trials^3 + num_trials^2 num_features)`.

    Source: Wilson et al., "Efficiently Sampling Functions from Gaussian Process Posteriors", 2020, equation 13; the
    kernel of pairs is the factorization of Rendle, "Factorization Machines", 2010, equation 4.
    """
    singles, pairs = _kernels(features, groups)
    # A point's prior variance is 1 on average, whatever the number of its parameters.
    of_single, of_pair = (_inverse(float(np.mean(np.diag(matrix)))) for matrix in (singles, pairs))
    best, few = (-math.inf, 0.0, 0.0), slice(-_MOST_FOR_EVIDENCE, None)
    for share in _PAIR_SHARES:
        kernel = 1.0 + (1 - share) * of_single * singles + share * of_pair * pairs
        for noise in _NOISES:
            best = max(best, (_log_evidence(kernel[few, few], noise, targets[few]), share, noise))
    _, share, noise = best
    of_single, of_pair = (1 - share) * of_single, share * of_pair
    prior = _draw_prior(groups, of_single, of_pair, random)
    kernel = 1.0 + of_single * singles + of_pair * pairs + noise * np.eye(len(targets))
    missing = targets - evaluate(prior, features) - math.sqrt(noise) * random.standard_normal(len(targets))
    dual = np.linalg.solve(kernel, missing)
    second = of_pair * (features.T * dual) @ features * _is_pair(groups)
    return Weights(
        prior.constant + float(dual.sum()), prior.first + of_single * features.T @ dual, prior.second + second
    )


def evaluate(weights: Weights, features: Array) -> Array:
    """Return the function at points, of shape (num_points,)."""
    return weights.constant + features @ weights.first + ((features @ weights.second) * features).sum(1) / 2


def _inverse(variance: float) -> float:
    # Points of one parameter have no pairs.
    return 1.0 / variance if variance > 1e-9 else 0.0


def _is_pair(groups: NDArray[np.int64]) -> NDArray[np.bool_]:
    return groups[:, None] != groups[None, :]


def _kernels(features: Array, groups: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return `sum_q s_q` and `sum_(q < r) s_q s_r`, with `s_q` the product of two trials' features of parameter q."""
    singles = features @ features.T
    squares = np.zeros_like(singles)
    for group in np.unique(groups):
        own = features[:, groups == group]
        squares += (own @ own.T) ** 2
    return singles, (singles**2 - squares) / 2


def _log_evidence(kernel: Array, noise: float, targets: Array) -> float:
    lower = np.linalg.cholesky(kernel + noise * np.eye(len(targets)))
    whitened = np.linalg.solve(lower, targets)
    return float(-0.5 * whitened @ whitened - np.log(np.diag(lower)).sum())


def _draw_prior(groups: NDArray[np.int64], of_single: float, of_pair: float, random: np.random.Generator) -> Weights:
    count = len(groups)
    upper = np.triu(random.standard_normal((count, count)), 1) * math.sqrt(of_pair)
    first = math.sqrt(of_single) * random.standard_normal(count)
    return Weights(float(random.standard_normal()), first, (upper + upper.T) * _is_pair(groups))


# A number with more values than that has cosines in the place of one feature a value.
_MOST_LEVELS = 12
_NUM_COSINES = 4
# Values of a long range that are looked at.
_NUM_CANDIDATES = 64


class Parameter:
    """The features of one parameter.

    A choice has one each, and so has a number with few values. Another number at position `t` of its range, between 0
    and 1, has `1, cos(pi t), cos(2 pi t) / 2, ..`: a smooth function, whose high frequencies have small weights.

    Args:
        distributions: what its values were drawn from; a number's range is the smallest that contains theirs.
        start: where its features begin among those of a point.
    """

    def __init__(self, distributions: Sequence[BaseDistribution], start: int) -> None:
        self._range = _union(distributions)
        self._columns: dict[Any, int] | None = None
        lists = [base.countable(distribution, _MOST_LEVELS) for distribution in distributions]
        values = [_key(value) for levels in lists if levels is not None for value in levels]
        if None not in lists and (self._range is None or len(set(values)) <= _MOST_LEVELS):
            self._columns = {value: column for column, value in enumerate(dict.fromkeys(values))}
        width = 1 + _NUM_COSINES if self._columns is None else len(self._columns)
        self.columns = slice(start, start + width)

    def features(self, values: Sequence[Any]) -> Array:
        """Return the features of values, of shape (num_values, num_features)."""
        if self._columns is not None:
            # A value between two levels, of a grid of fractions that was moved, has none.
            columns = [self._columns.get(_key(value), -1) for value in values]
            return (np.asarray(columns)[:, None] == np.arange(len(self._columns))).astype(float)
        assert self._range is not None
        where = np.array([base.position(self._range, value) for value in values])[:, None]
        orders = np.arange(1, _NUM_COSINES + 1)
        return np.concatenate([np.ones_like(where), np.cos(math.pi * where * orders) / orders], axis=1)

    def options(self, random: np.random.Generator) -> Array:
        """Return the features of what the parameter may be: of all values, or of some of its range."""
        if self._range is None or self._columns is not None:
            return np.eye(self.columns.stop - self.columns.start)
        return self.features(candidates(self._range, random))


class ParameterSpace:
    """The parameters that trials had, and which of them occur together.

    Args:
        outcomes: the trials.
    """

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        kinds: dict[str, dict[Any, BaseDistribution]] = {}
        for outcome in outcomes:
            for name, distribution in outcome.distributions.items():
                kinds.setdefault(name, {}).setdefault(_kind(distribution), distribution)
        self.parameters: dict[str, Parameter] = {}
        self.num_features = 0
        for name, distributions in kinds.items():
            self.parameters[name] = Parameter(list(distributions.values()), self.num_features)
            self.num_features = self.parameters[name].columns.stop
        widths = [parameter.columns.stop - parameter.columns.start for parameter in self.parameters.values()]
        self.groups = np.repeat(np.arange(len(widths)), widths)

    def features(self, points: Sequence[Mapping[str, Any]]) -> Array:
        """Return the features of points, zero for parameters that one has not: of shape (num_points, num_features)."""
        features = np.zeros((len(points), self.num_features))
        for name, parameter in self.parameters.items():
            rows = [row for row, point in enumerate(points) if name in point]
            if rows:
                features[rows, parameter.columns] = parameter.features([points[row][name] for row in rows])
        return features


def candidates(distribution: BaseDistribution, random: np.random.Generator) -> list[Any]:
    """Return values to choose from: all, or some of a long range, one in each of its equal parts."""
    values = base.countable(distribution, _NUM_CANDIDATES)
    if values is not None:
        return values
    return [base.at(distribution, (part + random.random()) / _NUM_CANDIDATES) for part in range(_NUM_CANDIDATES)]


def _key(value: Any) -> Any:
    # True and 1 are equal, and fractions may differ in their last bit.
    return (type(value), round(value, 9) if isinstance(value, float) else value)


def _kind(distribution: Any) -> Any:
    # Choices have no range; Optuna refuses others under the same name.
    return getattr(distribution, "low", None), getattr(distribution, "high", None), getattr(distribution, "step", None)


def _union(distributions: Sequence[BaseDistribution]) -> FloatDistribution | None:
    numbers = [number for number in distributions if isinstance(number, FloatDistribution | IntDistribution)]
    if not numbers:
        return None
    room = 0.5 if isinstance(numbers[0], IntDistribution) else 0.0
    low, high = min(number.low for number in numbers), max(number.high for number in numbers)
    return FloatDistribution(low - room, high + room, log=numbers[0].log)


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

    space: ParameterSpace
    weights: Weights
    options: dict[str, Array]
    company: dict[tuple[str, Any], frozenset[str]]
    tried: frozenset[Point]


AtLeastTwo = Annotated[int, Ge(2)]


@checked
class PredictorSampler(AbstractHistorySampler[Prediction | None]):
    """A learned performance predictor: Thompson sampling with a linear model of decisions and of pairs of decisions.

    For each trial, the weights of the model are drawn from their posterior given all finished trials; the trial then
    looks for the settings with the largest value of that model. It chooses one parameter after the other: the value
    with the largest sum of its own term, of its pairs with the values chosen before, and, for each parameter that is
    still to come, of the largest term and pairs of that parameter. (The parameters to come are those that earlier
    trials with this value had.) Settings that were tried before are avoided if possible.

    The model is fitted to the ranks of the trials' values. Failed trials are left out.

    Args:
        num_startup_trials: number of trials that have to finish before the model is used; until then values are random.
        max_trials: the most trials that the model is fitted to, half of them the best and half the newest. The time of
            a draw grows with the cube of this number.
        seed: seed of the random numbers.

    Raises:
        ConfigError: an option is out of range.

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

    def __init__(self, num_startup_trials: AtLeastTwo = 10, max_trials: AtLeastTwo = 250, seed: Seed = 0) -> None:
        super().__init__("predictor")
        self._num_startup_trials, self._max_trials, self._seed = num_startup_trials, max_trials, seed

    def begin(self, history: History, number: int) -> Prediction | None:
        """Return what the values of a trial are judged by, or None for random ones."""
        if len(history.scored) < self._num_startup_trials:
            return None
        outcomes = _learned_from(history.scored, self._max_trials)
        space, random = ParameterSpace(outcomes), base.generator(self._seed, number, "weights")
        features = space.features([outcome.params for outcome in outcomes])
        weights = draw_weights(features, space.groups, normal_scores([outcome.score for outcome in outcomes]), random)
        options = {name: parameter.options(random) for name, parameter in space.parameters.items()}
        return Prediction(space, weights, options, _company(outcomes), history.tried)

    def choose(self, state: Prediction | None, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return the value that promises most."""
        random = base.generator(self._seed, trial.number, "value", name)
        if state is None or name not in state.space.parameters:
            return base.draw(distribution, random)
        values = candidates(distribution, random)
        taken = frozenset(trial.params.items())
        untried = [value for value in values if taken | {(name, value)} not in state.tried]
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
    company = [state.company.get((name, _choice(distribution, value)), anyone) for value in values]
    slopes = slope + features @ weights.second[own]
    for other in sorted(frozenset().union(*company) - trial.params.keys() - {name}):
        gains = slopes[:, parameters[other].columns] @ state.options[other].T
        promises += gains.max(axis=1) * [other in names for names in company]
    return promises


def _company(outcomes: list[Outcome]) -> dict[tuple[str, Any], frozenset[str]]:
    kinds: dict[tuple[str, ...], int] = {}
    kinds_of: dict[tuple[str, Any], set[int]] = defaultdict(set)
    for outcome in outcomes:
        kind = kinds.setdefault(tuple(outcome.params), len(kinds))
        for name, value in outcome.params.items():
            kinds_of[name, None].add(kind)
            kinds_of[name, _choice(outcome.distributions[name], value)].add(kind)
    names = list(kinds)
    return {key: frozenset().union(*(names[number] for number in numbers)) for key, numbers in kinds_of.items()}


def _choice(distribution: BaseDistribution, value: Any) -> Any:
    return (type(value), value) if isinstance(distribution, CategoricalDistribution) else None


def _learned_from(outcomes: list[Outcome], count: int) -> list[Outcome]:
    if len(outcomes) <= count:
        return outcomes
    newest = outcomes[-(count // 2) :]
    others = sorted(outcomes[: -(count // 2)], key=lambda outcome: outcome.score)
    return others[-(count - count // 2) :] + newest
