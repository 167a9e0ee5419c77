"""Spaces, directions, and trials that did not complete."""

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.core.errors import ConfigError  # noqa: E402
from tests.sweep.samplers.spaces import Make, conditional, each_sampler  # noqa: E402

CHOICES = tuple("abcde")


def best(sampler: Any, num_trials: int) -> float:
    study = optuna.create_study(sampler=sampler)
    study.optimize(conditional, n_trials=num_trials)
    return float(study.best_value)


@each_sampler
def test_parameters_that_only_some_trials_have(make: Make) -> None:
    random = mean(best(optuna.samplers.RandomSampler(seed=seed), 60) for seed in range(8))
    assert mean(best(make(seed), 60) for seed in range(8)) < random


@each_sampler
def test_distributions_that_are_given_at_once(make: Make) -> None:
    kinds = optuna.distributions
    space = {
        "kind": kinds.CategoricalDistribution(("a", 1, None, True)),
        "one": kinds.CategoricalDistribution(("only",)),
        "rate": kinds.FloatDistribution(1e-5, 1.0, log=True),
        "share": kinds.FloatDistribution(0.1, 0.7, step=0.2),
        "width": kinds.IntDistribution(1, 1000, log=True),
        "depth": kinds.IntDistribution(2, 38, step=4),
    }
    study = optuna.create_study(sampler=make(0))
    for _ in range(30):
        trial = study.ask(space)
        assert trial.params.keys() == space.keys()
        for name, distribution in space.items():
            assert distribution._contains(distribution.to_internal_repr(trial.params[name]))
        study.tell(trial, trial.params["rate"])


def separable(trial: Any) -> float:
    return float(sum(CHOICES.index(trial.suggest_categorical(str(each), CHOICES)) for each in range(4)))


def failing(trial: Any) -> float:
    value = separable(trial)
    if trial.params["0"] == "a":
        raise ArithmeticError
    return value


def infinite(trial: Any) -> float:
    value = separable(trial)
    return math.inf if value > 10 else value


def pruned(trial: Any) -> float:
    """Report its value, after a worse one; three of four trials are pruned."""
    value = separable(trial)
    trial.report(value + 10.0, 1)
    trial.report(value, 2)
    if trial.number % 4:
        raise optuna.TrialPruned
    return value


@each_sampler
@pytest.mark.parametrize("objective", [separable, failing, infinite, pruned])
def test_late_trials_are_better_than_random_ones(objective: Callable[[Any], float], make: Make) -> None:
    """The best that does not fail is worth 0, or 1; a random point is worth 8."""
    late = []
    for seed in range(4):
        study = optuna.create_study(sampler=make(seed))
        study.optimize(objective, n_trials=60, catch=(ArithmeticError,))
        late += [separable(trial) for trial in study.trials[30:]]
    assert mean(late) < 6.5


@each_sampler
def test_one_does_as_well_upwards_as_downwards(make: Make) -> None:
    down, up = (optuna.create_study(sampler=make(0), direction=each) for each in ("minimize", "maximize"))
    down.optimize(separable, n_trials=30)
    up.optimize(lambda trial: -separable(trial), n_trials=30)
    assert [trial.params for trial in down.trials] == [trial.params for trial in up.trials]


@each_sampler
def test_all_trials_may_fail(make: Make) -> None:
    study = optuna.create_study(sampler=make(0))
    for _ in range(40):
        trial = study.ask({"kind": optuna.distributions.CategoricalDistribution(CHOICES)})
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert {trial.params["kind"] for trial in study.trials} == set(CHOICES)


@each_sampler
def test_values_that_another_process_fixed_are_learned_from(make: Make) -> None:
    study = optuna.create_study(sampler=make(0))
    for _ in range(12):
        study.enqueue_trial({"0": "c"})
    study.optimize(separable, n_trials=30)
    assert {trial.params["0"] for trial in study.trials[:12]} == {"c"}
    assert len({trial.params["0"] for trial in study.trials[12:]}) > 1


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@each_sampler
def test_hyperband_shows_a_sampler_the_trials_of_its_bracket(make: Make) -> None:
    def objective(trial: Any) -> float:
        value = separable(trial)
        for step in range(1, 10):
            trial.report(value + 1 / step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)
    study = optuna.create_study(study_name="one", sampler=make(0), pruner=pruner)
    study.optimize(objective, n_trials=60)
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "PRUNED"}
    assert study.best_value < 4


@each_sampler
def test_two_objectives_are_refused(make: Make) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=make(0))
    with pytest.raises(ConfigError, match=r"sweep\.sampler: found '\w+' with 2 objectives; expected one.*=nsga2"):
        study.ask().suggest_float("rate", 0.0, 1.0)
