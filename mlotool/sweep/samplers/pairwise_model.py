"""Bayesian linear regression on decisions and pairs of decisions, and draws from its posterior."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PAIR_SHARES = (0.05, 0.2, 0.5)
"""How much of the prior variance of a point's value the pairs may have."""
_NOISES = (1e-3, 1e-2, 1e-1, 1.0)
"""Variances of the noise, beside a prior variance of 1."""
_MOST_FOR_EVIDENCE = 100
"""Trials by which these two are chosen, the last ones."""


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
    return np.array([NormalDist().inv_cdf(each) for each in middles])[inverse]


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
    of_single, of_pair = (_inverse(float(np.mean(np.diag(each)))) for each in (singles, pairs))
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
