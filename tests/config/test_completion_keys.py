from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool.config import compose, package_dir
from mlotool.config.completion_keys import compose_keys
from tests.config.conftest import message_of

BUILT_IN = sorted(path.stem for path in package_dir("recipes").glob("*.yaml"))
DATA = sorted(path.stem for path in (package_dir("conf") / "data").glob("*.yaml"))
Write = Callable[..., Path]


def dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield f"{prefix}{key}"
        yield from dotted_keys(value, f"{prefix}{key}.")


def assert_as_hydra(recipe: str, *overrides: str) -> None:
    config = compose_keys([f"+recipe={recipe}", *overrides])
    del config["hydra"]
    expected = OmegaConf.to_container(compose(recipe, overrides), resolve=False)
    assert set(dotted_keys(config)) == set(dotted_keys(expected))


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_the_keys_of_a_recipe_are_hydra_s(recipe: str) -> None:
    assert_as_hydra(recipe)


@pytest.mark.parametrize("option", DATA)
def test_the_keys_of_data_are_hydra_s(option: str) -> None:
    assert_as_hydra("plain", f"data={option}")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("mwn", ["hypergradient=neumann", "logger=wandb"]),
        ("mwn", ["hypergradient=first_order", "logger=csv", "runner=gpu", "debug=off"]),
        ("mwn_cifar10_small", ["model@problems.classifier.module=linear", "data=digits_noisy"]),
        ("plain", ["+optimizer@problems.other.optimizer=adam", "+model@problems.other.module=mlp"]),
        ("plain", ["data=[digits,image_folder]", "hypergradient='cg'", "seed=1"]),
        ("plain", ["~optimizer@problems.classifier.optimizer"]),
    ],
)
def test_the_keys_after_choices_are_hydra_s(recipe: str, overrides: list[str]) -> None:
    assert_as_hydra(recipe, *overrides)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "defaults: [mwn_cifar10, _self_, {override /data: mnist}, {override /hypergradient: neumann}]",
        "defaults: [/recipe/mwn, _self_, {override /debug: 'off'}]\nproblems: {reweight: {stream: null}}",
        "defaults: [plain, {optional /optimizer@problems.other.optimizer: adam}]\nevaluate: null\nseed: ???",
        "defaults: [_self_, plain]\nproblems: {classifier: {scheduler: {lr: [1, {a: 2}]}}}",
    ],
)
@pytest.mark.parametrize("name", ["mine", "sub/mine"])
def test_the_keys_of_an_own_recipe_are_hydra_s(write_recipe: Write, body: str, name: str) -> None:
    write_recipe(body + "\n", name)
    write_recipe("defaults: [/recipe/plain, _self_]\nname: plain\n", "sub/plain")
    write_recipe("defaults: [/recipe/mwn_cifar10, _self_]\n", "sub/mwn_cifar10")
    assert_as_hydra(name)


def test_a_sweep_has_the_keys_of_its_first_options() -> None:
    config = compose_keys(["+recipe=mwn,plain", "hypergradient=first_order,cg"])
    assert list(config["problems"]) == ["classifier", "reweight"]
    assert list(config["hypergradient"]) == ["_target_"]


def test_a_recipe_of_another_folder_comes_first(write_recipe: Write, folder: Path) -> None:
    path = write_recipe("defaults: [plain]\nname: here\n").rename(folder / "mine.yaml")
    assert compose_keys(["+recipe=mine"], [path.parent])["name"] == "here"


@pytest.mark.parametrize("body", ["- a list\n", "a: [\n", "defaults: 5\n", "defaults: [{/hydra/launcher: x}]\n"])
def test_what_is_no_recipe_is_refused(write_recipe: Write, body: str) -> None:
    write_recipe(body)
    assert "mine" in message_of(compose_keys, ["+recipe=mine"])


def test_an_unknown_recipe_or_option_is_refused() -> None:
    assert "Did you mean 'mwn'?" in message_of(compose_keys, ["+recipe=mwnn"])
    assert "digitz" in message_of(compose_keys, ["data=digitz"])
