"""What all samplers of ours have in common: values, what they are told of earlier trials, options and examples."""

import doctest
import importlib
import math
import pkgutil
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402

import mlotool.sweep.samplers  # noqa: E402
from mlotool.core.errors import ConfigError  # noqa: E402
from mlotool.sweep.samplers.base import (  # noqa: E402
    at,
    contains,
    countable,
    draw,
    position,
    read_history,
)
from mlotool.sweep.samplers.predictor import Parameter, candidates  # noqa: E402
from mlotool.sweep.study_options import make_sampler, option_faults  # noqa: E402

NUMBERS = [
    FloatDistribution(-1.0, 3.0),
    FloatDistribution(1e-6, 1e-1, log=True),
    FloatDistribution(0.1, 0.7, step=0.2),
    IntDistribution(3, 11),
    IntDistribution(1, 1000, log=True),
    IntDistribution(2, 10, step=4),
]


@pytest.mark.parametrize("distribution", NUMBERS, ids=str)
def test_a_position_is_where_its_value_lies(distribution: FloatDistribution | IntDistribution) -> None:
    for where in np.linspace(0.0, 1.0, 41):
        value = at(distribution, where)
        assert distribution._contains(distribution.to_internal_repr(value))
        assert at(distribution, position(distribution, value)) == pytest.approx(value)
    assert (at(distribution, 0.0), at(distribution, 1.0)) == pytest.approx((distribution.low, distribution.high))


@pytest.mark.parametrize("distribution", NUMBERS, ids=str)
def test_values_are_drawn_from_all_of_a_range(distribution: FloatDistribution | IntDistribution) -> None:
    random = np.random.default_rng(0)
    where = [position(distribution, draw(distribution, random)) for _ in range(4000)]
    # Of a grid with few values the middles of its steps.
    assert np.mean(where) == pytest.approx(0.5, abs=0.03)
    values = countable(distribution, 10)
    if values is not None:
        drawn = [draw(distribution, random) for _ in range(4000)]
        assert all(drawn.count(each) == pytest.approx(4000 / len(values), rel=0.2) for each in values)


def test_values_that_can_be_counted_or_taken() -> None:
    assert countable(FloatDistribution(0.1, 0.7, step=0.2), 4) == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert countable(FloatDistribution(0.1, 0.7, step=0.2), 3) is None
    assert countable(IntDistribution(1, 4, log=True), 4) == [1, 2, 3, 4]
    assert countable(CategoricalDistribution(("a", None)), 1) == ["a", None]
    assert contains(IntDistribution(0, 3), 3) and not contains(IntDistribution(0, 2), 3)
    assert contains(CategoricalDistribution(("a", None)), None) and not contains(CategoricalDistribution(("a",)), "b")


def test_decisions_and_numbers_of_few_values_have_a_feature_a_value() -> None:
    parameter = Parameter([CategoricalDistribution(("a", True, 1))], start=2)
    assert parameter.columns == slice(2, 5)
    assert parameter.features([1, "a", True]).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    parameter = Parameter([IntDistribution(0, 2), IntDistribution(0, 4)], start=0)
    assert parameter.features([4, 0]).tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert parameter.options(np.random.default_rng(0)).tolist() == np.eye(5).tolist()


def test_other_numbers_have_cosines_of_their_position_in_all_ranges() -> None:
    parameter = Parameter([FloatDistribution(1e-4, 1e-2, log=True), FloatDistribution(1e-3, 1.0, log=True)], start=0)
    expected = [1.0, math.cos(math.pi / 4), 0.0, math.cos(3 * math.pi / 4) / 3, -0.25]
    assert parameter.features([1e-3])[0].tolist() == pytest.approx(expected)
    assert Parameter([IntDistribution(1, 99)], start=0).features([50])[0].tolist() == pytest.approx(
        [1, 0, -0.5, 0, 0.25]
    )


def test_candidates_of_a_long_range_lie_all_over_it() -> None:
    found = candidates(FloatDistribution(1e-6, 1.0, log=True), np.random.default_rng(0))
    assert len(found) == 64 and found == sorted(found)
    assert found[0] < 2e-6 and found[-1] > 0.5


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


def test_what_is_known_when_a_trial_begins() -> None:
    study = optuna.create_study()
    for ended in (3, 1, 2, 1):
        add(study, "COMPLETE", 1.0, ended=ended)
    running = study.ask(RATE)
    study.ask(RATE)
    history = read_history(study, 5, "evolution")
    assert [outcome.number for outcome in history.outcomes] == [1, 3, 2, 0]
    assert len(history.tried) == 5 and frozenset(running.params.items()) in history.tried


WRONG = [
    ("evolution", {"population_size": 0}, "population_size: found 0; expected a whole number of at least 1"),
    ("evolution", {"population": 8}, "population: found an option that 'evolution' does not have.*'population_size'"),
    ("reinforce", {"entropy_weight": float("nan")}, "entropy_weight: found nan; expected a number of at least 0"),
    (
        "predictor",
        {"seed": 3},
        "sampler_options.seed: found an option that 'predictor' does not have; expected sweep.seed",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_what_a_sampler_does_not_take_is_told_once(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^sweep\.sampler_options\..*" + message.rpartition("options.")[2]) as raised:
        make_sampler(name, options, seed=0)
    assert str(raised.value).count("expected") == 1
    settings = {"method": "optuna", "sampler": name, "seed": 0, "sampler_options": options}
    assert option_faults({**settings, "pruner": "none", "pruner_options": None}) == [str(raised.value)]


MODULES = [each.name for each in pkgutil.walk_packages(mlotool.sweep.samplers.__path__, "mlotool.sweep.samplers.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
