"""How good what samplers find in tables of 360 points is, beside what random draws find."""

from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.sweep.study_options import make_sampler  # noqa: E402
from tests.sweep.samplers.tables import TABLES, Table, regret  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {"tpe": {"multivariate": True, "group": True}}
# Of random's regret.
MOST = {"evolution": 0.6, "predictor": 0.6, "tpe": 0.6, "reinforce": 1.0}
NUM_TRIALS = 60

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@cache
def mean_regret(table: int, sampler: str, num_seeds: int) -> float:
    values = Table(*TABLES[table])
    make: Callable[[int], Any] = lambda seed: make_sampler(sampler, OPTIONS.get(sampler, {}), seed)  # noqa: E731
    return mean(regret(values, make(seed), NUM_TRIALS) for seed in range(num_seeds))


@pytest.mark.parametrize("sampler", MOST)
def test_samplers_find_better_points_than_random_draws(sampler: str) -> None:
    assert mean_regret(0, sampler, 6) < MOST[sampler] * mean_regret(0, "random", 6)


def test_brute_force_tries_each_point_once_and_ends() -> None:
    table = Table(*TABLES[0])
    study = optuna.create_study(direction="maximize", sampler=make_sampler("brute_force", {}, 0))
    study.optimize(table.ask)
    assert len(study.trials) == 360 == len({tuple(trial.params.values()) for trial in study.trials})
    assert study.best_value == 1.0
