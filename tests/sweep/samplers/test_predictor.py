"""The learned predictor, and its regression against closed forms."""

from typing import Any

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from mlotool.sweep.samplers import predictor  # noqa: E402
from mlotool.sweep.samplers.predictor import (  # noqa: E402
    PredictorSampler,
    Weights,
    draw_weights,
    evaluate,
    normal_scores,
)

GROUPS = np.array([0, 0, 0, 1, 1, 2, 2])


def points(count: int, seed: int) -> np.ndarray:
    """Return points with a decision of three, one of two, and two features of a number that some points do not have."""
    random = np.random.default_rng(seed)
    three, two = np.eye(3)[random.integers(3, size=count)], np.eye(2)[random.integers(2, size=count)]
    number = random.standard_normal((count, 2)) * (random.random((count, 1)) < 0.7)
    return np.concatenate([three, two, number], 1)


def explicit(features: np.ndarray) -> np.ndarray:
    """Return a constant, the features, and the products of features of different parameters."""
    pairs = [(i, j) for i in range(7) for j in range(i) if GROUPS[i] != GROUPS[j]]
    products = np.stack([features[:, i] * features[:, j] for i, j in pairs], 1)
    return np.concatenate([np.ones((len(features), 1)), features, products], 1)


def test_draws_have_the_posterior_of_the_regression_with_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    share, noise = 0.3, 0.1
    monkeypatch.setattr(predictor, "_PAIR_SHARES", (share,))
    monkeypatch.setattr(predictor, "_NOISES", (noise,))
    features, others = points(12, 0), points(5, 1)
    targets = np.random.default_rng(2).standard_normal(12)
    singles, pairs = explicit(features)[:, 1:8], explicit(features)[:, 8:]
    variances = np.concatenate(
        [
            [1.0],
            np.full(7, (1 - share) / np.mean((singles**2).sum(1))),
            np.full(pairs.shape[1], share / np.mean((pairs**2).sum(1))),
        ]
    )
    precision = explicit(features).T @ explicit(features) / noise + np.diag(1 / variances)
    mean = explicit(others) @ np.linalg.solve(precision, explicit(features).T @ targets / noise)
    covariance = explicit(others) @ np.linalg.inv(precision) @ explicit(others).T

    random = np.random.default_rng(3)
    draws = np.stack([evaluate(draw_weights(features, GROUPS, targets, random), others) for _ in range(4000)])
    assert draws.mean(0) == pytest.approx(mean, abs=0.06)
    assert np.abs(np.cov(draws.T) - covariance).max() < 0.06


@pytest.mark.parametrize("interacts", [False, True])
def test_with_enough_data_a_draw_is_the_function_itself(interacts: bool) -> None:
    features, others, random = points(200, 0), points(20, 1), np.random.default_rng(2)
    second = random.standard_normal((7, 7)) * (GROUPS[:, None] != GROUPS[None, :]) * interacts
    truth = Weights(0.5, random.standard_normal(7), second + second.T)
    scale = evaluate(truth, features).std()
    drawn = draw_weights(features, GROUPS, evaluate(truth, features) / scale, random)
    assert np.mean((evaluate(drawn, others) - evaluate(truth, others) / scale) ** 2) < 1e-2


def test_weights_within_a_parameter_are_zero() -> None:
    drawn = draw_weights(points(9, 0), GROUPS, np.arange(9.0), np.random.default_rng(0))
    assert drawn.second == pytest.approx(drawn.second.T)
    assert not drawn.second[GROUPS[:, None] == GROUPS[None, :]].any()
    features = np.eye(3)[[0, 1, 2, 0]]
    drawn = draw_weights(features, np.zeros(3, dtype=int), normal_scores([1, 2, 3, 1]), np.random.default_rng(0))
    assert not drawn.second.any() and evaluate(drawn, features).argmax() == 2


def test_equal_scores_have_equal_ranks() -> None:
    found = normal_scores([3.0, 1.0, 1.0, -1e9])
    assert found[1] == found[2] and found[0] == -found[3] and found[3] < found[1] < found[0]
    assert normal_scores([2.0, 2.0]).tolist() == [0.0, 0.0]


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
