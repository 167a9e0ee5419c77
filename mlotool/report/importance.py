"""How much each hyperparameter of a sweep matters for its objective."""

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.report.sweep_columns import Column

MIN_JOBS = 6
MAX_COLUMNS = 40
MAX_JOBS = 1_000
"""Of larger sweeps the rank correlations are taken: fANOVA costs their product, and more."""

FANOVA = "share of the objective's variance, by fANOVA of Optuna"
CORRELATION = "absolute rank correlation with the objective; of names, the correlation ratio of ranks"


def importances(columns: Sequence[Column], objective: Sequence[float]) -> tuple[str, list[tuple[str, float]]]:
    """Return how importance was measured, and each column's, the largest first; empty where it cannot be told.

    Args:
        columns: of the settings that finished.
        objective: theirs.
    """
    if len(objective) < max(MIN_JOBS, len(columns) + 4) or len(set(objective)) < 2 or not columns:
        return "", []
    shares = None
    if len(columns) <= MAX_COLUMNS and len(objective) <= MAX_JOBS:
        # Optuna asserts that no variance is less than zero, as rounding may make one.
        with suppress(ImportError, AssertionError):
            shares = _fanova(import_module("optuna"), columns, objective)
    method = CORRELATION if shares is None else FANOVA
    found = shares or [_correlation(column, np.asarray(objective)) for column in columns]
    labelled = [(column.label, value) for column, value in zip(columns, found, strict=True) if math.isfinite(value)]
    return method, sorted(labelled, key=lambda pair: -pair[1])


def _fanova(optuna: Any, columns: Sequence[Column], objective: Sequence[float]) -> list[float]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Made anew from the table, so that a grid has importances too.
    study = optuna.create_study()
    numbers = [column.numbers for column in columns]
    distributions = {column.key: _distribution(optuna.distributions, column) for column in columns}
    for index, value in enumerate(objective):
        params = {
            column.key: str(column.texts[index]) if own is None else own[index]
            for column, own in zip(columns, numbers, strict=True)
        }
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return [float(found.get(column.key, 0.0)) for column in columns]


def _distribution(kinds: Any, column: Column) -> Any:
    numbers = column.numbers
    if numbers is None:
        return kinds.CategoricalDistribution(sorted({str(text) for text in column.texts}))
    return kinds.FloatDistribution(min(numbers), max(numbers), log=column.is_log)


def _correlation(column: Column, objective: NDArray[np.float64]) -> float:
    ranks = _ranks(objective)
    if column.numbers is not None:
        own = _ranks(np.asarray(column.numbers))
        return abs(float(np.corrcoef(own, ranks)[0, 1])) if np.ptp(own) > 0 else 0.0
    _, groups = np.unique(np.asarray([str(text) for text in column.texts]), return_inverse=True)
    sizes = np.bincount(groups)
    between = (sizes * (np.bincount(groups, ranks) / sizes - ranks.mean()) ** 2).sum()
    return float(np.sqrt(between / ((ranks - ranks.mean()) ** 2).sum()))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return means[inverse]
