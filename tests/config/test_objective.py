"""The direction of an objective is derived where it is known, demanded where not, and never contradicted."""

from typing import Any

import pytest

from mlotool.config import check, compose, differences
from mlotool.config.objective import direction_faults, is_wrong_way_round, objective_direction
from mlotool.config.schema import METRIC_DIRECTIONS
from mlotool.core.errors import ConfigError

EVALUATE = {"problem": "model", "metrics": [*METRIC_DIRECTIONS, {"_target_": "mine.metric"}], "splits": {"val": 10}}
SMALLER = {
    *("calibration_error", "cross_entropy", "nats_per_token", "bits_per_token"),
    *("mean_squared_error", "mean_absolute_error"),
}


def values_of(objective: str | None, mode: str | None = None, **changes: Any) -> dict[str, Any]:
    return {"objective": objective, "objective_mode": mode, "evaluate": EVALUATE, **changes}


@pytest.mark.parametrize("metric", METRIC_DIRECTIONS)
def test_the_direction_of_every_metric_is_known(metric: str) -> None:
    expected, other = ("min", "max") if metric in SMALLER else ("max", "min")
    for mode in (None, expected, other):
        assert objective_direction(values_of(f"val/{metric}", mode)) == expected
    assert not list(direction_faults(values_of(f"val/{metric}")))
    assert not list(direction_faults(values_of(f"val/{metric}", expected)))
    [fault] = direction_faults(values_of(f"val/{metric}", other))
    assert f"found '{other}' with objective=val/{metric}; expected {expected}" in fault


def test_losses_are_to_be_small() -> None:
    assert objective_direction(values_of("weights/loss")) == "min"
    assert is_wrong_way_round(values_of("weights/loss", "max"))


@pytest.mark.parametrize("key", ["val/mine", "val/after", "weights/gradient_norm", "weights/accuracy", "other/f1"])
def test_of_other_keys_it_is_demanded(key: str) -> None:
    [fault] = direction_faults(values_of(key))
    assert f"found nothing for objective={key}" in fault
    assert objective_direction(values_of(key)) is None
    assert objective_direction(values_of(key, "min")) == "min"
    assert not list(direction_faults(values_of(key, "max")))


def test_a_metric_that_is_not_listed_by_name_may_mean_anything() -> None:
    own = {**EVALUATE, "metrics": [{"_target_": "mine.accuracy"}]}
    assert objective_direction(values_of("val/accuracy", evaluate=own)) is None


@pytest.mark.parametrize("evaluate", [None, 5, "val", [], {}, {"splits": 5, "metrics": 5}, {"splits": None}])
def test_it_can_be_asked_of_anything(evaluate: Any) -> None:
    assert objective_direction(values_of("val/accuracy", "max", evaluate=evaluate)) == "max"
    assert objective_direction(values_of(None, "max", evaluate=evaluate)) is None


def test_an_error_is_minimized_without_a_word() -> None:
    words = ["evaluate.metrics=[mean_squared_error]", "objective=val/mean_squared_error"]
    config = compose("plain", words)
    check(config)
    assert objective_direction(config) == "min"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective_mode=min"], "found 'min' with objective=val/accuracy; expected max, as larger values of accuracy"),
        (["objective=classifier/loss", "objective_mode=max"], "expected min, as smaller values of loss are better"),
        (["objective=classifier/other"], "found nothing for objective=classifier/other"),
        (["objective_mode=most"], "objective_mode: found 'most'; expected one of min, max"),
    ],
)
def test_a_check_refuses_what_contradicts_or_is_unknown(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose("plain", words))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("mode", "is_fine"), [(None, False), ("min", False), ("max", True)])
def test_a_plateau_of_the_objective_has_its_direction(mode: str | None, is_fine: bool) -> None:
    setting = "" if mode is None else f", mode: {mode}"
    key = "problems.classifier.scheduler"
    words = [f"{key}={{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau{setting}}}", f"{key}_interval=evaluation"]
    if is_fine:
        check(compose("plain", words))
        return
    with pytest.raises(ConfigError, match=f"{key}.mode: found .*; expected max, or the rate falls"):
        check(compose("plain", words))


def test_a_direction_that_was_written_out_is_no_difference() -> None:
    assert differences(values_of("val/accuracy", "max"), values_of("val/accuracy")) == []
    assert differences(values_of(None, "max"), values_of(None)) == []
    assert differences(values_of("val/mine", "max"), values_of("val/mine", "min")) != []
