"""Tables of values to search: a decision a parameter, with effects of decisions and of pairs of them."""

from itertools import combinations, product
from typing import Any

import numpy as np
import optuna

SIZES = (3, 4, 5, 3, 2)
TABLES = ((0, 0.3), (1, 0.6), (2, 0.6), (3, 0.6), (4, 0.6), (5, 0.6))
"""Seed, and standard deviation of a pair's effect beside that of a decision, 1. Samplers are held to the first one."""


class Table:
    """360 points with values between 0 and 1, of which 1 is the best.

    Args:
        seed: of the effects.
        interaction: standard deviation of a pair's effect.
    """

    def __init__(self, seed: int, interaction: float) -> None:
        random = np.random.default_rng(seed)
        singles = [random.standard_normal(size) for size in SIZES]
        pairs = {
            (i, j): interaction * random.standard_normal((SIZES[i], SIZES[j]))
            for i, j in combinations(range(len(SIZES)), 2)
        }
        raw = {
            point: sum(single[each] for single, each in zip(singles, point, strict=True))
            + sum(pair[point[i], point[j]] for (i, j), pair in pairs.items())
            for point in product(*map(range, SIZES))
        }
        low, high = min(raw.values()), max(raw.values())
        self.values = {point: float((value - low) / (high - low)) for point, value in raw.items()}

    def ask(self, trial: optuna.Trial) -> float:
        """Return the value of the point that a trial draws, decision by decision."""
        point = (trial.suggest_categorical(f"decision_{i}", list(range(size))) for i, size in enumerate(SIZES))
        return self.values[tuple(point)]


def regret(table: Table, sampler: Any, num_trials: int) -> float:
    """Return how far the best of a study is from the best of the table."""
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(table.ask, n_trials=num_trials)
    return 1.0 - study.best_value


def hypervolume(points: list[tuple[float, float]]) -> float:
    """Return the area below points whose values are both to be large, above 0."""
    area, height = 0.0, 0.0
    for x, y in sorted(points, reverse=True):
        if y > height:
            area += x * (y - height)
            height = y
    return area
