"""What samplers are told of earlier trials."""

from datetime import datetime, timedelta
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.sweep.samplers.base import read_history  # noqa: E402

RATE = {"rate": optuna.distributions.FloatDistribution(0.0, 1.0)}
BEGIN = datetime(2026, 1, 1)


def add(study: Any, state: str, value: float | None = None, *, ended: int = 0, last: float | None = None) -> None:
    trial = optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        params={"rate": 0.1 * len(study.trials)},
        distributions=RATE,
        value=value,
        intermediate_values={} if last is None else {1: 99.0, 2: last},
    )
    trial.datetime_complete = BEGIN + timedelta(seconds=ended)
    study.add_trial(trial)


def test_trials_in_the_order_in_which_they_finished() -> None:
    study = optuna.create_study()
    for ended in (3, 1, 2, 1):
        add(study, "COMPLETE", 1.0, ended=ended)
    study.ask(RATE)
    assert [each.number for each in read_history(study, 5, "evolution").outcomes] == [1, 3, 2, 0]


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1.0), ("minimize", -1.0)])
def test_more_is_better_in_both_directions(direction: str, sign: float) -> None:
    study = optuna.create_study(direction=direction)
    add(study, "COMPLETE", 2.0)
    add(study, "FAIL")
    add(study, "PRUNED")
    add(study, "PRUNED", last=float("nan"))
    add(study, "COMPLETE", float("inf"))
    history = read_history(study, 9, "evolution")
    assert [each.score for each in history.outcomes] == [sign * 2.0, *[-float("inf")] * 4]
    assert [each.score for each in history.scored] == [sign * 2.0]


def test_a_pruned_trial_is_no_better_than_the_median_of_those_before_it() -> None:
    study = optuna.create_study(direction="minimize")
    add(study, "PRUNED", last=0.1, ended=0)
    for ended, value in enumerate((1.0, 3.0, 2.0), start=1):
        add(study, "COMPLETE", value, ended=ended)
    add(study, "PRUNED", last=0.1, ended=4)
    add(study, "PRUNED", last=5.0, ended=5)
    add(study, "COMPLETE", 0.5, ended=6)
    scores = [each.score for each in read_history(study, 9, "evolution").outcomes]
    assert scores == [-0.1, -1.0, -3.0, -2.0, -2.0, -5.0, -0.5]


def test_what_was_tried_is_what_has_a_lower_number() -> None:
    study = optuna.create_study()
    add(study, "COMPLETE", 1.0)
    running = study.ask(RATE)
    study.ask(RATE)
    history = read_history(study, 2, "evolution")
    assert history.tried == {frozenset({("rate", 0.0)}), frozenset(running.params.items())}
    assert [each.number for each in history.outcomes] == [0]
