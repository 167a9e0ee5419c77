"""The learned predictor."""

from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.sweep.samplers import predictor  # noqa: E402
from mlotool.sweep.samplers.base import Outcome  # noqa: E402
from mlotool.sweep.samplers.predictor import PredictorSampler  # noqa: E402

CHOICES = tuple("abcdef")


def test_pairs_of_decisions_are_learned() -> None:
    """The value depends on whether two decisions are equal, and on neither of them alone."""

    def objective(trial: Any) -> float:
        one, two = (trial.suggest_categorical(name, CHOICES[:4]) for name in ("one", "two"))
        other = trial.suggest_categorical("other", CHOICES)
        return float(one != two) + 0.1 * CHOICES.index(other)

    study = optuna.create_study(sampler=PredictorSampler())
    study.optimize(objective, n_trials=60)
    late = [trial.value for trial in study.trials[30:]]
    # A random point is worth 1.
    assert sum(late) / len(late) < 0.5
    assert study.best_value == 0.0


def test_a_first_decision_is_judged_by_what_it_makes_possible() -> None:
    """A choice with one good continuation among bad ones, beside one whose continuations are all mediocre."""

    def objective(trial: Any) -> float:
        if trial.suggest_categorical("kind", ("rich", "safe")) == "safe":
            return 1.0 + 0.01 * trial.suggest_int("small", 0, 3)
        return 0.0 if trial.suggest_categorical("detail", CHOICES) == "d" else 2.0

    study = optuna.create_study(sampler=PredictorSampler())
    study.optimize(objective, n_trials=30)
    assert study.best_value == 0.0


def test_no_point_is_tried_twice_while_there_are_others_at_its_last_decision() -> None:
    study = optuna.create_study(sampler=PredictorSampler(num_startup_trials=2))
    for _ in range(12):
        trial = study.ask()
        study.tell(trial, CHOICES.index(trial.suggest_categorical("kind", CHOICES)))
    # The first two are random.
    assert {trial.params["kind"] for trial in study.trials[:8]} == set(CHOICES)


def test_values_are_random_until_enough_trials_have_values() -> None:
    studies = [optuna.create_study(sampler=PredictorSampler(num_startup_trials=each)) for each in (6, 50)]
    for study in studies:
        for number in range(20):
            trial = study.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)})
            if number % 2:
                study.tell(trial, trial.params["x"])
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
    one, other = ([trial.params["x"] for trial in study.trials] for study in studies)
    # The sixth value comes with trial 11.
    assert one[:12] == other[:12]
    assert all(first != second for first, second in zip(one[12:], other[12:], strict=True))


def test_what_it_learns_from_is_bounded() -> None:
    outcomes = [Outcome(number, float(-abs(number - 3)), {}, {}) for number in range(20)]
    assert [each.number for each in predictor._learned_from(outcomes, 6)] == [2, 4, 3, 17, 18, 19]
    assert predictor._learned_from(outcomes, 20) == outcomes
    study = optuna.create_study(sampler=PredictorSampler(max_trials=5))
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=30)
    assert study.best_value < 0.02


def test_parameters_that_are_new() -> None:
    study = optuna.create_study(sampler=PredictorSampler(num_startup_trials=2))
    for number in range(12):
        trial = study.ask()
        trial.suggest_float(f"of_{number}", 0.0, 1.0)
        study.tell(trial, trial.suggest_float("x", 0.0, 1.0))
    assert study.best_value < 0.1
