import pytest

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.auxiliary.step_schedule import StepSchedule


def test_it_is_multiplied_until_it_is_as_large_as_it_may_be() -> None:
    grown = StepSchedule.of({"start": 2.0, "factor": 10.0, "every": 3, "maximum": 150.0}, "beta")
    assert [grown.at(step) for step in (0, 2, 3, 5, 6, 9, 100)] == [2.0, 2.0, 20.0, 20.0, 150.0, 150.0, 150.0]
    assert StepSchedule.of(7, "beta").at(1000) == 7


def test_no_number_of_steps_is_too_large() -> None:
    """10^400 is no floating-point number."""
    assert StepSchedule.of({"start": 2, "factor": 10, "maximum": 150}, "beta").at(400) == 150.0
    endless = StepSchedule.of({"start": 2, "factor": 10, "maximum": float("inf")}, "beta")
    assert endless == StepSchedule.of({"start": 2, "factor": 10}, "beta")
    assert endless.at(400) == float("inf")
    assert StepSchedule.of({"start": 2.0, "factor": 0.1}, "rate").at(400) == 0.0


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        -1.0,
        float("inf"),
        "5",
        {"start": 1.0, "factor": 0.0},
        {"start": 1.0, "factor": float("inf")},
        {"factor": 2.0},
        {"start": 1.0, "by": 2},
        {"start": 1.0, "every": 2.5},
        {"start": 1.0, "every": True},
        {"start": 10**400},
        [1.0],
    ],
)
def test_what_it_cannot_be(value) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.beta: found"):
        StepSchedule.of(value, "parallel.beta")
