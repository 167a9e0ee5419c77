"""Samplers of ours, and an objective whose parameters depend on each other."""

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("optuna")

from mlotool.sweep.samplers.evolution import EvolutionSampler
from mlotool.sweep.samplers.predictor import PredictorSampler
from mlotool.sweep.samplers.reinforce import ReinforceSampler

Make = Callable[[int], Any]
MAKERS: dict[str, Make] = {
    "evolution": lambda seed: EvolutionSampler(population_size=8, sample_size=4, seed=seed),
    "reinforce": lambda seed: ReinforceSampler(seed=seed),
    "predictor": lambda seed: PredictorSampler(num_startup_trials=8, seed=seed),
}
each_sampler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def conditional(trial: Any) -> float:
    """Return a loss of a space with parameters that only some trials have, and a range that differs by trial."""
    kind = trial.suggest_categorical("kind", ("linear", "deep", "wide"))
    loss = (math.log10(trial.suggest_float("rate", 1e-4, 1e-1, log=True)) + 2.0) ** 2
    if kind == "deep":
        num_layers = trial.suggest_int("num_layers", 2, 6)
        loss += abs(num_layers - 4) / 4
        loss += trial.suggest_int("skip_from", 0, num_layers - 1) / 10
        loss += 0.3 if trial.suggest_categorical("norm", (True, False)) else 0.0
    elif kind == "wide":
        loss += 1.0 - trial.suggest_float("dropout", 0.0, 0.5, step=0.1)
        loss += trial.suggest_int("width", 8, 512, log=True) / 512
    else:
        loss += 1.5
    return float(loss)
