"""Options of samplers, as `sweep.sampler_options` has them."""

from typing import Any

import pytest

pytest.importorskip("optuna")

from mlotool.config.schema import OWN_SAMPLERS, SAMPLERS
from mlotool.core.errors import ConfigError
from mlotool.sweep.study_options import make_sampler, option_faults

WRONG = [
    ("evolution", {"population_size": 0}, "population_size: found 0; expected a whole number of at least 1"),
    ("evolution", {"sample_size": 2.5}, "sample_size: found 2.5; expected a whole number"),
    ("evolution", {"sample_size": True}, "sample_size: found True; expected a whole number"),
    ("evolution", {"population": 8}, "population: found an option that 'evolution' does not have.*'population_size'"),
    ("reinforce", {"learning_rate": 0}, "learning_rate: found 0; expected a number greater than 0"),
    ("reinforce", {"learning_rate": float("inf")}, "learning_rate: found inf"),
    ("reinforce", {"entropy_weight": float("nan")}, "entropy_weight: found nan; expected a number of at least 0"),
    ("reinforce", {"baseline_window": 0}, "baseline_window: found 0"),
    ("reinforce", {"num_bins": 1}, "num_bins: found 1; expected a whole number of at least 2"),
    ("predictor", {"num_startup_trials": 1}, "num_startup_trials: found 1"),
    ("predictor", {"max_trials": None}, "max_trials: found None"),
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


def test_samplers_of_ours_have_names_that_a_sweep_takes() -> None:
    assert set(OWN_SAMPLERS) < SAMPLERS.keys()
    assert {type(make_sampler(name, {}, seed=0)).__module__ for name in OWN_SAMPLERS} == {
        f"mlotool.sweep.samplers.{name}" for name in OWN_SAMPLERS
    }
