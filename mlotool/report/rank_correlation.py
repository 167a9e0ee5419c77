"""How well one figure of the jobs of a sweep orders another: rank correlations, and importances of hyperparameters."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

from mlotool.report.sweep import Column

NUM_DRAWS, LEVEL = 2_000, 0.95
MIN_JOBS = 6
# Of larger sweeps the rank correlations are taken: fANOVA costs their product, and more.
MAX_COLUMNS, MAX_JOBS = 40, 1_000

FANOVA = "share of the objective's variance, by fANOVA of Optuna"
CORRELATION = "absolute rank correlation with the objective; of names, the correlation ratio of ranks"


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's correlation of ranks.

    Args:
        value: from -1 to 1; NaN where one figure is the same everywhere.
        low, high: the ends of its bootstrap interval of 95 %.
        num_pairs: of how many pairs.
    """

    value: float
    low: float
    high: float
    num_pairs: int


def rank_correlation(pairs: Sequence[tuple[float, float]], seed: int = 0) -> RankCorrelation:
    """Return Spearman's correlation of pairs, with an interval.

        rho = correlation of rank(a_i) and rank(b_i);   ties have the mean of their ranks

    The interval is between percentiles of the correlations of samples of the pairs, drawn with replacement; a sample in
    which one figure is the same everywhere has none, and is left out.

    Args:
        pairs: finite numbers.
        seed: of the samples.

    Source: Spearman 1904; Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3.

    Example:
        >>> rank_correlation([(0.1, 0.5), (0.2, 0.6), (0.3, 0.9)]).value
        1.0
    """
    values = np.asarray(pairs, dtype=float).reshape(-1, 2)
    chosen = np.random.default_rng(seed).integers(max(len(values), 1), size=(NUM_DRAWS, len(values)))
    drawn = _spearman(values[chosen])
    drawn = drawn[~np.isnan(drawn)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(drawn) else (np.nan, np.nan)
    return RankCorrelation(float(_spearman(values[None])[0]), float(low), float(high), len(values))


def _spearman(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation of each sample of pairs, [samples, pairs, 2]."""
    if samples.shape[1] < 2:
        return np.full(len(samples), np.nan)
    ranks = rankdata(samples, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        rho: NDArray[np.float64] = ranks.prod(axis=2).sum(axis=1) / np.sqrt((ranks**2).sum(axis=1).prod(axis=1))
    return rho.round(12)


def importances(columns: Sequence[Column], objective: Sequence[float]) -> tuple[str, list[tuple[str, float]]]:
    """Return how importance was measured, and each column's, the largest first; empty where it cannot be told.

    Args:
        columns: of the settings that finished.
        objective: theirs.
    """
    if len(objective) < max(MIN_JOBS, len(columns) + 4) or len(set(objective)) < 2 or not columns:
        return "", []
    method, values = CORRELATION, list[float]()
    if len(columns) <= MAX_COLUMNS and len(objective) <= MAX_JOBS:
        # Optuna asserts that no variance is less than zero, as rounding may make one.
        with suppress(ImportError, AssertionError):
            method, values = FANOVA, _fanova(import_module("optuna"), columns, objective)
    if not values:
        method, values = CORRELATION, [_correlation(column, np.asarray(objective)) for column in columns]
    labelled = zip((column.label for column in columns), values, strict=True)
    return method, sorted((pair for pair in labelled if np.isfinite(pair[1])), key=lambda pair: -pair[1])


def _fanova(optuna: Any, columns: Sequence[Column], objective: Sequence[float]) -> list[float]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Made anew from the table, so that a grid has importances too.
    study, kinds = optuna.create_study(), optuna.distributions
    values: dict[str, Any] = {column.key: column.numbers or tuple(map(str, column.texts)) for column in columns}
    distributions: dict[str, Any] = {}
    for column in columns:
        known: Any = sorted(set(values[column.key]))
        is_named = column.numbers is None
        distributions[column.key] = (
            kinds.CategoricalDistribution(known)
            if is_named
            else kinds.FloatDistribution(known[0], known[-1], log=column.is_log)
        )
    for index, value in enumerate(objective):
        params = {key: known[index] for key, known in values.items()}
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        importance = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return [float(importance.get(column.key, 0.0)) for column in columns]


def _correlation(column: Column, objective: NDArray[np.float64]) -> float:
    if column.numbers is not None:
        return abs(float(spearmanr(column.numbers, objective).statistic)) if len(set(column.numbers)) > 1 else 0.0
    ranks = rankdata(objective)
    _, groups = np.unique([str(text) for text in column.texts], return_inverse=True)
    sizes = np.bincount(groups)
    between = (sizes * (np.bincount(groups, ranks) / sizes - ranks.mean()) ** 2).sum()
    return float(np.sqrt(between / ((ranks - ranks.mean()) ** 2).sum()))
