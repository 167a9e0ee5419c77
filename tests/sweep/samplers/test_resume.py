"""What a sampler draws follows from the study, the seed and the trial's number, and from nothing that it keeps."""

from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from tests.sweep.samplers.spaces import Make, conditional, each_sampler  # noqa: E402


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
def test_another_seed_draws_other_points(make: Make) -> None:
    studies = [optuna.create_study(sampler=make(seed)) for seed in (1, 1, 2)]
    for study in studies:
        study.optimize(conditional, n_trials=12)
    first, same, other = map(values_of, studies)
    assert first == same
    assert all(one != two for one, two in zip(first, other, strict=True))


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
def test_studies_of_one_name_do_not_share_what_was_learned(make: Make) -> None:
    sampler, found = make(0), []
    for _ in range(2):
        study = optuna.create_study(study_name="one", sampler=sampler)
        study.optimize(conditional, n_trials=12)
        found.append(values_of(study))
    assert found[0] == found[1]
