"""How good what samplers find in tables of 360 points is, beside what random draws find."""

from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.sweep.study_options import make_sampler  # noqa: E402
from tests.sweep.samplers.tables import TABLES, Table, hypervolume, regret  # noqa: E402

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


@pytest.mark.slow
@pytest.mark.parametrize("table", range(len(TABLES)))
def test_so_they_do_in_each_table_on_average_over_many_seeds(table: int) -> None:
    random = mean_regret(table, "random", 50)
    for sampler, most in MOST.items():
        assert mean_regret(table, sampler, 50) < most * random


def found_by(sampler: Any, num_trials: int) -> float:
    """Return the hypervolume of a study with two objectives."""
    first, second = Table(*TABLES[0]), Table(*TABLES[1])
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
    study.optimize(lambda trial: (first.ask(trial), second.ask(trial)), n_trials=num_trials)
    return hypervolume([tuple(trial.values) for trial in study.trials])


def test_nsga2_finds_better_fronts_than_random_draws() -> None:
    searched = mean(found_by(make_sampler("nsga2", {"population_size": 12}, seed), 60) for seed in range(10))
    assert searched > mean(found_by(make_sampler("random", {}, seed), 60) for seed in range(10))


def test_brute_force_tries_each_point_once_and_ends() -> None:
    table = Table(*TABLES[0])
    study = optuna.create_study(direction="maximize", sampler=make_sampler("brute_force", {}, 0))
    study.optimize(table.ask)
    assert len(study.trials) == 360 == len({tuple(trial.params.values()) for trial in study.trials})
    assert study.best_value == 1.0


def test_the_volume_of_two_points() -> None:
    assert hypervolume([(0.5, 0.5), (1.0, 0.25), (0.25, 0.25)]) == 0.375
