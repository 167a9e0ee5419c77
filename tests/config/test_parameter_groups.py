"""`groups` of an optimizer: some parameters have settings of their own."""

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from mlotool import Schedule
from mlotool.config import build, check
from mlotool.config.instantiate import grouped
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
OPTIMIZER = "problems.classifier.optimizer"


def _groups(*groups: Any) -> dict[str, Any]:
    return {f"{OPTIMIZER}.groups": list(groups)}


def test_each_group_has_its_settings_and_the_rest_the_optimizers(changed: Change) -> None:
    config = changed(_groups({"match": "layers.5.*", "lr": 0.5}, {"match": ["*.bias"], "weight_decay": 0.0}))
    assert check(config, targets=True) == []
    problem = build(config).program.problems["classifier"]
    settings = dict(zip(problem.theta, problem.optimizer_step.hyperparameters(), strict=True))
    rates = {name: (each["lr"], each["weight_decay"]) for name, each in settings.items()}
    assert rates == {
        "layers.1.weight": (0.01, 5e-3),
        "layers.1.bias": (0.01, 0.0),
        "layers.3.weight": (0.01, 5e-3),
        "layers.3.bias": (0.01, 0.0),
        "layers.5.weight": (0.5, 5e-3),  # the first group that fits
        "layers.5.bias": (0.5, 5e-3),
    }


def test_a_group_steps_at_its_own_rate(changed: Change) -> None:
    config = changed({**_groups({"match": "layers.5.*", "lr": 0.0}), f"{OPTIMIZER}.weight_decay": 0.0})
    program = build(config).program
    before = {name: tensor.clone() for name, tensor in program.problems["classifier"].constants().items()}
    Schedule(program).tick()
    after = program.problems["classifier"].constants()
    assert {name for name in before if before[name].equal(after[name])} == {"layers.5.weight", "layers.5.bias"}


def test_no_group_is_left_over_when_all_parameters_have_one() -> None:
    assert grouped("groups", [{"match": "*", "betas": [0.5, 0.9]}], {"a": 1}) == [{"params": [1], "betas": (0.5, 0.9)}]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"match": "layers.5.*", "lr": 0.1}, ["groups: found", "expected a list"]),
        ([{"lr": 0.1}], ["groups[0]: found", "`match`"]),
        ([{"match": "layers.5.*"}], ["groups[0]: found", "settings of the optimizer"]),
        ([{"match": "layers.5.*", "rl": 0.1}], ["groups[0].rl", "torch.optim.SGD"]),
        ([{"match": "layers.5.*", "params": []}], ["fills 'params' in itself"]),
        ([{"match": "layers.5.*", "lr": {"problem": "reweight"}}], ["groups[0].lr", "no setting that a problem"]),
    ],
)
def test_faults_are_named(changed: Change, groups: Any, expected: list[str]) -> None:
    message = message_of(check, changed({f"{OPTIMIZER}.groups": groups}), targets=True)
    assert all(part in message for part in expected), message
