"""What a user reads after a slip: the key, the value, the line, a suggestion; never a traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlotool.config import compose
from tests.config.conftest import message_of

OVERRIDES = {
    "runner.max_tick=1": ["runner.max_tick", "Did you mean 'max_ticks'?"],
    "problems.classifier.optimizer.lrr=1": ["problems.classifier.optimizer.lrr", "Did you mean 'lr'?"],
    "hypergradient=neuman": ["hypergradient/neuman", "Did you mean 'neumann'?"],
    "+data=cifar10": ["data", "Multiple values"],
    "graph.upper_to_lower.reweight=classifier": ["graph.upper_to_lower.reweight: found 'classifier'", "a list"],
    "+data@_global_=mine": ["_global_", "expected a place such as"],
    "evaluate.bogus=1": ["evaluate.bogus: unknown key"],
    "problems.clasifier.stream.split=val": ["Did you mean 'classifier'?"],
}
RECIPES = {
    "trianer: {a: 1}": ["mine.yaml, line 3: trianer", "Did you mean 'runner'?"],
    "name: x\nproblems:\n  classifier: {unrol_steps: 2}": ["mine.yaml, line 5: problems.classifier.unrol_steps"],
    "runner: {callbacks: {_target_: x}}": ["mine.yaml, line 3: runner.callbacks: found a node; expected a list"],
    "defaults: [mwm, _self_]": ["mine.yaml, line 3: In 'recipe/mine': Could", "recipe/mwm", "Did you mean 'mwn'?"],
    "defaults:\n- mwn\n- override /data: digit": ["mine.yaml, line 5: In", "data/digit", "Did you mean 'digits'?"],
    "defaults:\n- mwn\n- override /data: [digits, x]": ["mine.yaml, line 5: In 'config': Could not load 'data/x'"],
    "defaults:\n- mwn\n- override /model@problems.x: mlp": ["mine.yaml, line 5: ", "Did you mean to override one of"],
    "defaults:\n- mwn\n\n- /data: digits": ["mine.yaml, line 6: Multiple values for data"],
    "defaults:\n- override /data: digits\n- mwn": ["mine.yaml, line 4: ", "Overrides must be at the end"],
    "defaults:\n- mwn\n- override /modle: x": ["mine.yaml: defaults, line 5, 'override /modle: x'", "mean 'model'?"],
}
MANY = """
defaults: [mwn, _self_]
sede: 3
problems:
  classifier: {unroll_steps: many, warmup: 3}
logger: {project: [1]}
"""
OWN = "data: {_target_: mypackage.Data, root: x}\n"
ADAM = "problems.classifier.optimizer={_target_: torch.optim.Adam, lr: 0.5}"


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_slip_on_the_command_line(override: str) -> None:
    message = message_of(compose, "mwn", [override])
    assert all(part in message for part in OVERRIDES[override]), message


@pytest.mark.parametrize("body", RECIPES)
def test_a_slip_in_a_recipe(body: str, write_recipe: Callable[..., Path]) -> None:
    write_recipe(body)
    message = message_of(compose, "mine")
    assert all(part in message for part in RECIPES[body]), message


def test_a_recipe_that_is_not_there(write_recipe: Callable[..., Path]) -> None:
    assert "Did you mean 'mwn'?" in message_of(compose, "mwm")
    assert "Did you mean 'mwn'?" in message_of(compose, None, ["+recipe=mwm"])
    write_recipe("name: mine")
    assert "mine.yaml'?" in message_of(compose, "recipes/mien.yaml")
    assert "ends in .yaml" in message_of(compose, "recipes/mine.yml")


def test_all_keys_that_do_not_fit_the_schema_are_said_at_once(write_recipe: Callable[..., Path]) -> None:
    write_recipe(MANY)
    lines = message_of(compose, "mine", ["runner.max_ticks=many", "loger.x=1", "runner.log_every=5"]).splitlines()
    keys = ("sede", "problems.classifier.unroll_steps", "problems.classifier.warmup", "logger.project")
    for key, line in zip((*keys, "runner.max_ticks", "loger.x"), lines, strict=True):
        assert f"{key.removesuffix('.x')}: " in line


def test_a_node_that_a_recipe_writes_out_has_no_keys_of_the_default_option(write_recipe: Callable[..., Path]) -> None:
    write_recipe(OWN)
    assert compose("mine").data == {"_target_": "mypackage.Data", "root": "x"}
    write_recipe("data: {_target_: mlotool.data.Digits, augment: true}\n")
    assert compose("mine").data.num_classes == 10


def test_a_node_beside_a_choice_of_another_target_is_refused(write_recipe: Callable[..., Path]) -> None:
    write_recipe(OWN)
    assert "beside the choice data=mnist" in message_of(compose, "mine", ["data=mnist"])
    write_recipe(f"defaults: [plain, _self_]\n{OWN}", name="above")
    assert compose("above").data == {"_target_": "mypackage.Data", "root": "x"}
