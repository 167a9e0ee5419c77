"""What each sampler of ours does in any space; its draws follow from the study, the seed and a trial's number."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mlotool.core.errors import ConfigError  # noqa: E402
from mlotool.sweep.samplers.evolution import EvolutionSampler  # noqa: E402
from mlotool.sweep.samplers.predictor import PredictorSampler  # noqa: E402
from mlotool.sweep.samplers.reinforce import ReinforceSampler  # noqa: E402

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


def values_of(study: Any) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


@each_sampler
def test_a_study_that_goes_on_draws_as_one_that_was_never_interrupted(make: Make, tmp_path: Path) -> None:
    whole = optuna.create_study(sampler=make(1))
    whole.optimize(conditional, n_trials=20)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=url, study_name="study", sampler=make(1)).optimize(conditional, n_trials=8)
    for num_trials in (1, 11):
        optuna.load_study(storage=url, study_name="study", sampler=make(1)).optimize(conditional, n_trials=num_trials)
    assert values_of(optuna.load_study(storage=url, study_name="study")) == values_of(whole)


@each_sampler
def test_the_order_in_which_workers_ask_does_not_matter(make: Make) -> None:
    """Trials that are open at once take their values by turns; the order of their names does not matter either."""
    space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in "abc"}
    found = []
    for by_turns in (False, True):
        study = optuna.create_study(sampler=make(0))
        for _ in range(10):
            trial = study.ask(space)
            study.tell(trial, sum(trial.params.values()))
        if by_turns:
            one, two = study.ask(), study.ask()
            for name in "abc":
                for trial in (two, one):
                    trial.suggest_float(name, 0.0, 1.0)
        else:
            one, two = study.ask(space), study.ask(space)
        found.append((one.params, two.params))
        assert one.params != two.params
    assert found[0] == found[1]


@each_sampler
def test_a_trial_keeps_to_what_was_known_when_it_began(make: Make) -> None:
    """Its values are drawn from one state, even if another trial ends between two of them."""
    found = []
    for ends_early in (False, True):
        study = optuna.create_study(sampler=make(0))
        study.optimize(conditional, n_trials=12)
        trial, other = study.ask(), study.ask()
        trial.suggest_categorical("kind", ("linear", "deep", "wide"))
        other.suggest_categorical("kind", ("linear", "deep", "wide"))
        if ends_early:
            study.tell(other, -100.0)
        trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        found.append(trial.params)
    assert found[0] == found[1]


@each_sampler
def test_draws_follow_the_seed_and_nothing_that_another_study_of_the_name_has_taught(make: Make) -> None:
    one, other, found = make(0), make(1), []
    for sampler in (one, one, other):
        study = optuna.create_study(study_name="one", sampler=sampler)
        study.optimize(conditional, n_trials=12)
        found.append(values_of(study))
    assert found[0] == found[1]
    assert all(first != second for first, second in zip(found[0], found[2], strict=True))


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
def test_trials_that_fail_or_were_fixed_by_another_process_and_two_objectives(make: Make) -> None:
    study = optuna.create_study(sampler=make(0))
    for _ in range(40):
        trial = study.ask({"0": optuna.distributions.CategoricalDistribution(CHOICES)})
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert {trial.params["0"] for trial in study.trials} == set(CHOICES)
    study = optuna.create_study(sampler=make(0))
    for _ in range(12):
        study.enqueue_trial({"0": "c"})
    study.optimize(separable, n_trials=30)
    assert len({trial.params["0"] for trial in study.trials[12:]}) > 1
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=make(0))
    with pytest.raises(ConfigError, match=r"sweep\.sampler: found '\w+' with 2 objectives; expected one.*=nsga2"):
        study.ask().suggest_float("rate", 0.0, 1.0)
