"""Regularized evolution, step by step."""

from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.sweep.samplers.evolution import EvolutionSampler  # noqa: E402

SPACE = {name: optuna.distributions.CategoricalDistribution(tuple(range(6))) for name in "abcd"}


def run(study: Any, num_trials: int) -> None:
    for _ in range(num_trials):
        trial = study.ask(SPACE)
        study.tell(trial, sum(trial.params.values()))


def distance(one: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(one[name] != other[name] for name in SPACE)


def test_a_child_differs_from_one_of_the_last_trials_by_one_parameter() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=6, sample_size=3))
    run(study, 40)
    points = [trial.params for trial in study.trials]
    for number in range(6, 40):
        assert min(distance(points[number], each) for each in points[number - 6 : number]) == 1
    # The first ones are random.
    assert min(distance(points[number], each) for number in range(6) for each in points[:number]) > 1


def test_the_parent_is_the_best_of_those_that_are_still_there() -> None:
    """With a sample that is sure to hold all of the population."""
    study = optuna.create_study(sampler=EvolutionSampler(population_size=4, sample_size=200))
    for each in (0, 2, 5, 5):
        study.enqueue_trial(dict.fromkeys("abcd", each))
    run(study, 5)
    assert distance(study.trials[4].params, dict.fromkeys("abcd", 0)) == 1
    study.enqueue_trial(dict.fromkeys("abcd", 5))
    run(study, 2)
    # The first one has died, though it is the best of all; its child is what is best now.
    assert distance(study.trials[6].params, study.trials[4].params) == 1
    assert distance(study.trials[6].params, dict.fromkeys("abcd", 0)) > 0
    for _ in range(4):
        study.enqueue_trial(dict.fromkeys("abcd", 4))
    run(study, 5)
    assert distance(study.trials[-1].params, dict.fromkeys("abcd", 4)) == 1


def test_no_point_is_tried_twice_while_its_parent_has_others() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=4, sample_size=4, seed=2))
    run(study, 60)
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 60
    # A space that is used up goes on.
    study = optuna.create_study(sampler=EvolutionSampler(population_size=3, sample_size=2))
    for _ in range(12):
        trial = study.ask()
        study.tell(trial, trial.suggest_int("a", 0, 1) + trial.suggest_int("b", 0, 1))
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 4


def test_a_parent_that_failed_has_no_children() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=4, sample_size=2))
    failed = optuna.trial.TrialState.FAIL
    for _ in range(12):
        study.tell(study.ask(SPACE), state=failed)
    points = [trial.params for trial in study.trials]
    assert max(distance(points[number], points[number - 1]) for number in range(4, 12)) > 2


def test_what_the_parent_may_not_give_is_drawn() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=2, sample_size=2))
    for number in range(20):
        trial = study.ask()
        trial.suggest_int("index", 10 * number, 10 * number + 9)
        study.tell(trial, trial.suggest_float("x", 0.0, 1.0))
    assert len({trial.params["x"] for trial in study.trials}) > 2
