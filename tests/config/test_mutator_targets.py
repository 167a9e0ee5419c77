"""What may stand in a mutator's node: the kind of each node follows from the setting that it stands under."""

from typing import Any

import pytest

from mlotool.config import check, compose
from mlotool.core.errors import ConfigError

LINEAR = {"_target_": "torch.nn.Linear"}
KEEPS = {"_target_": "mlotool.spaces.KeepsShape"}


def checked(mutator: dict[str, Any]) -> None:
    """Check the recipe explore_mwn with one mutator of the classifier in the place of its own."""
    config = compose("explore_mwn", ["logger=csv"])
    config.problems.classifier.module.mutators = [{"name": "own", "at": "layers.3", **mutator}]
    check(config)


@pytest.mark.parametrize(
    "mutator",
    [
        # A candidate has any name, those of settings included.
        {"_target_": "mlotool.spaces.Insert", "candidates": {"where": LINEAR, "at": LINEAR, "mutators": LINEAR}},
        {"_target_": "mlotool.spaces.Insert", "at": {"where": KEEPS}, "candidates": {"none": None}},
        {
            "_target_": "mlotool.spaces.Insert",
            "at": {"chain": ["layers.3", {"where": KEEPS}]},
            "candidates": {"none": None},
        },
        {"_target_": "mlotool.spaces.Input", "sources": {"where": KEEPS}},
        {
            "_target_": "mlotool.spaces.Grow",
            "steps": 1,
            "mutators": {"deepen": {"_target_": "mlotool.spaces.Insert", "candidates": {"linear": LINEAR}}},
        },
    ],
)
def test_nodes_of_their_kind(mutator: dict[str, Any]) -> None:
    checked(mutator)


@pytest.mark.parametrize(
    ("mutator", "key"),
    [
        ({"_target_": "mlotool.spaces.Insert", "candidates": {"keeps": KEEPS}}, "candidates.keeps"),
        ({"_target_": "mlotool.spaces.Insert", "at": {"where": LINEAR}, "candidates": {"none": None}}, "at.where"),
        ({"_target_": "mlotool.spaces.Grow", "steps": 1, "mutators": {"deepen": LINEAR}}, "mutators.deepen"),
        ({"_target_": "mlotool.spaces.Grow", "steps": 1, "mutators": {"os": {"_target_": "os.system"}}}, "mutators.os"),
    ],
)
def test_nodes_of_another_kind_are_refused(mutator: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"mutators\[0\]\.{key}\._target_: found '.*expected"):
        checked(mutator)


def test_settings_of_a_mutator_inside_another_are_known() -> None:
    node = {"_target_": "mlotool.spaces.Branch", "candidates": {"linear": LINEAR}, "joint": "sum"}
    with pytest.raises(ConfigError, match=r"unknown keyword 'joint' of mlotool\.spaces\.Branch.*Did you mean 'join'"):
        checked({"_target_": "mlotool.spaces.Grow", "steps": 1, "mutators": {"branch": node}})
