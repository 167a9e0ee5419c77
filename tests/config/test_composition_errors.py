"""What a user reads after a slip: the key, the value, a suggestion; never a traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException

from mlotool.config import VERSION_KEYWORDS, compose, package_dir, register_sources, translate
from tests.config.conftest import message_of

OVERRIDES = {
    "runner.max_tick=1": ["runner.max_tick", "Did you mean 'max_ticks'?"],
    "problems.clasifier.unroll_steps=1": ["problems.clasifier", "Did you mean 'classifier'?"],
    "problems.classifier.optimizer.lrr=1": ["Did you mean 'lr'?", "+problems.classifier.optimizer.lrr"],
    "dat=digits": ["dat", "Did you mean 'data'?"],
    "data=digit": ["data: found 'digit'", "Did you mean 'digits'?"],
    "hypergradient=conjugate": ["hypergradient: found 'conjugate'", "cg"],
    "model@problems.classifer.module=mlp": ["Did you mean 'model@problems.classifier.module'?"],
    "model@problems.classifier.module=mpl": ["found 'mpl'", "Did you mean 'mlp'?"],
    "+modle@problems.classifier.module=mlp": ["group 'modle'", "Did you mean 'model'?"],
    "+data=cifar10": ["data: found a second choice", "data=cifar10 without a plus"],
    "runner.max_ticks=abc": ["runner.max_ticks: found 'abc'", "a whole number"],
    "problems.classifier.stream.shuffle=perhaps": ["found 'perhaps'", "true or false"],
    "problems.classifier.channels_last=3": ["problems.classifier.channels_last: found 3", "true or false"],
    "runner.report=0": ["runner.report: found 0; expected true or false"],
    "graph.upper_to_lower.reweight=classifier": ["graph.upper_to_lower.reweight: found 'classifier'", "a list"],
    "problems=3": ["problems: found 3", "a mapping"],
    "seed=1,2": ["seed=1,2", "Add -m"],
    "~problems.classifier.stream": ["Write problems.classifier.stream=null."],
    "seed=[1": ["seed=[1", "key=value"],
    "seed": ["'seed'", "key=value"],
    "+seed=1": ["seed: found a plus", "seed=.. without the plus"],
    "+problems.clasifier.unroll_steps=1": ["problems.clasifier", "Correct the name"],
    "evaluate.splits.val.x=1": ["evaluate.splits.val.x", "expected no keys"],
    "~problems.foo": ["problems.foo", "mlotool show"],
}
RECIPES = {
    "trianer: {a: 1}": ["recipe/mine", "trianer", "Did you mean 'runner'?"],
    "problems: {classifier: {unrol_steps: 2}}": ["problems.classifier.unrol_steps", "Did you mean 'unroll_steps'?"],
    "runner: {max_ticks: abc}": ["recipe/mine", "runner.max_ticks: found 'abc'", "a whole number"],
    "problems: [a]": ["recipe/mine", "Correct it"],
    "defaults: [mwm, _self_]": ["recipe: found 'mwm'", "Did you mean 'mwn'?"],
    "defaults: [mwn, _self_, {override /data: digit}]": ["data: found 'digit'", "Did you mean 'digits'?"],
    "defaults: [mwn, _self_, {override /model@problems.clasifier.module: mlp}]": [
        "Did you mean 'model@problems.classifier.module'?"
    ],
    "defaults: [{override /data: mnist}, mwn]": ["override /data: mnist", "last"],
    "defaults: [mwn, {/data: mnist}]": ["- override /data: mnist"],
}


def _assert_says(message: str, parts: list[str]) -> None:
    assert all(part in message for part in parts), message
    assert "Traceback" not in message
    assert "full_key" not in message


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_slip_on_the_command_line(override: str) -> None:
    _assert_says(message_of(compose, "mwn", [override]), OVERRIDES[override])


@pytest.mark.parametrize("body", RECIPES)
def test_a_slip_in_a_recipe(body: str, write_recipe: Callable[..., Path]) -> None:
    write_recipe(body)
    _assert_says(message_of(compose, "mine"), RECIPES[body])


@pytest.mark.parametrize(("recipe", "override"), [("mwm", None), (None, "+recipe=mwm")])
def test_a_recipe_that_is_not_there(recipe: str | None, override: str | None) -> None:
    message = message_of(compose, recipe, [override] if override else [])
    _assert_says(message, ["recipe: found 'mwm'", "Did you mean 'mwn'?", "mlotool list"])


def test_a_recipe_without_a_plus() -> None:
    _assert_says(message_of(compose, None, ["recipe=mwn"]), ["recipe", "Add the plus"])


def test_a_recipe_file_that_is_not_there(write_recipe: Callable[..., Path]) -> None:
    write_recipe("name: mine")
    assert "mine.yaml'?" in message_of(compose, "recipes/mien.yaml")
    assert "ends in .yaml" in message_of(compose, "recipes/mine.yml")


def test_what_hydra_raises_elsewhere_translates_too() -> None:
    register_sources()
    with initialize_config_dir(str(package_dir("conf")), **VERSION_KEYWORDS), pytest.raises(HydraException) as caught:
        hydra_compose("config", ["+recipe=mwn", "runner.max_tick=1"])
    _assert_says(str(translate(caught.value)), OVERRIDES["runner.max_tick=1"])
