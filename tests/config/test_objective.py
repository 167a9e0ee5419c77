"""The direction of an objective is derived where it is known, demanded where not, and never contradicted."""

from typing import Any

import pytest

from mlotool.config import check, compose, differences
from mlotool.config.objective import direction_faults, objective_direction
from mlotool.config.schema import METRIC_DIRECTIONS
from mlotool.core.errors import ConfigError

EVALUATE = {"problem": "model", "metrics": [*METRIC_DIRECTIONS, {"_target_": "mine.metric"}], "splits": {"val": 10}}
SMALLER = {
    *("calibration_error", "cross_entropy", "nats_per_token", "bits_per_token"),
    *("mean_squared_error", "mean_absolute_error"),
}


def values_of(objective: str | None, mode: str | None = None, **changes: Any) -> dict[str, Any]:
    return {"objective": objective, "objective_mode": mode, "evaluate": EVALUATE, **changes}


def test_the_direction_of_every_metric_is_known() -> None:
    for metric in METRIC_DIRECTIONS:
        expected, other = ("min", "max") if metric in SMALLER else ("max", "min")
        for mode in (None, expected, other):
            assert objective_direction(values_of(f"val/{metric}", mode)) == expected
        assert not list(direction_faults(values_of(f"val/{metric}", expected)))
        [fault] = direction_faults(values_of(f"val/{metric}", other))
        assert f"found '{other}' with objective=val/{metric}; expected {expected}" in fault


def test_losses_are_to_be_small() -> None:
    assert objective_direction(values_of("weights/loss")) == "min"
    assert list(direction_faults(values_of("weights/loss", "max")))


@pytest.mark.parametrize("key", ["val/mine", "weights/accuracy", "other/f1"])
def test_of_other_keys_it_is_demanded(key: str) -> None:
    [fault] = direction_faults(values_of(key))
    assert f"smaller values of objective={key} are better" in fault
    assert objective_direction(values_of(key)) is None
    assert objective_direction(values_of(key, "min")) == "min"
    assert not list(direction_faults(values_of(key, "max")))
    # A function of the user's may give its metric any name.
    own = {**EVALUATE, "metrics": [{"_target_": "mine.accuracy"}]}
    assert objective_direction(values_of("val/accuracy", evaluate=own)) is None


@pytest.mark.parametrize("evaluate", [None, 5, "val", [], {}, {"splits": 5, "metrics": 5}])
def test_it_can_be_asked_of_anything(evaluate: Any) -> None:
    assert objective_direction(values_of("val/accuracy", "max", evaluate=evaluate)) == "max"
    assert objective_direction(values_of(None, "max", evaluate=evaluate)) is None


@pytest.mark.parametrize("mode", ["min", "most"])
def test_a_check_refuses_what_contradicts_or_is_unknown(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"^objective_mode: found '{mode}'.*$"):
        check(compose("plain", [f"objective_mode={mode}"]))


def test_a_plateau_of_the_objective_has_its_direction() -> None:
    key, target = "problems.classifier.scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"
    check(compose("plain", [f"{key}={{_target_: {target}, mode: max}}", f"{key}_interval=evaluation"]))
    with pytest.raises(ConfigError, match=f"{key}.mode: found 'min'.*; expected max, or the rate falls"):
        check(compose("plain", [f"{key}={{_target_: {target}}}", f"{key}_interval=evaluation"]))


def test_a_direction_that_was_written_out_is_no_difference() -> None:
    assert differences(values_of("val/accuracy", "max"), values_of("val/accuracy")) == []
    assert differences(values_of(None, "max"), values_of(None)) == []
    assert differences(values_of("val/mine", "max"), values_of("val/mine", "min")) != []
