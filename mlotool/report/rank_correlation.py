"""Whether two figures of the same things put them into the same order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 2_000
LEVEL = 0.95


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
    generator = np.random.default_rng(seed)
    samples = generator.integers(max(len(values), 1), size=(NUM_DRAWS, len(values)))
    drawn = [each for each in (_spearman(values[sample]) for sample in samples) if not np.isnan(each)]
    rest = (1 - LEVEL) / 2
    low, high = (float(each) for each in np.quantile(drawn, [rest, 1 - rest])) if drawn else (np.nan, np.nan)
    return RankCorrelation(_spearman(values), low, high, len(values))


def _spearman(values: NDArray[np.float64]) -> float:
    if len(values) < 2 or np.ptp(values, axis=0).min() == 0:
        return float("nan")
    return round(float(np.corrcoef(_ranks(values[:, 0]), _ranks(values[:, 1]))[0, 1]), 12)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    # The ranks of a value end at how many are not larger.
    last = counts.cumsum()
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[places]
    return ranks
