"""A node with another `_target_` begins anew: the settings of the one before are not mixed into it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from mlotool.config import CONFIG_NAME, VERSION_KEYWORDS, compose, package_dir
from mlotool.config.completion_keys import compose_keys
from mlotool.config.replacement import Layer, dropped_places, without

Write = Callable[..., Path]
OWN = "data: {_target_: mypackage.Data, root: x}"
DIGITS = ["_target_", "num_classes", "image_shape", "sizes", "seed", "imbalance_factor", "label_noise", "augment"]


def node(recipe: str, place: str, *overrides: str) -> dict[str, Any]:
    """A node of a composed recipe; completion, which has no Hydra, sees the same keys."""
    found: Any = OmegaConf.to_container(OmegaConf.select(compose(recipe, overrides), place), resolve=False)
    completed: Any = compose_keys([f"+recipe={recipe}", *overrides])
    for part in place.split("."):
        completed = completed[part]
    if not any("{" in word for word in overrides):
        assert set(completed) == set(found)
    return dict(found)


@pytest.fixture
def own(write_recipe: Write) -> Write:
    write_recipe(f"defaults: [plain, _self_]\n{OWN}\n", "own")
    write_recipe("defaults: [own, _self_]\ndata: {root: y}\n", "heir")
    write_recipe("defaults: [own, _self_, {override /data: mnist}]\ndata: {root: y}\n", "chooser")
    return write_recipe


def test_another_target_drops_the_default_s_keys(own: Write) -> None:
    assert node("own", "data") == {"_target_": "mypackage.Data", "root": "x"}


def test_the_same_target_merges(write_recipe: Write) -> None:
    write_recipe("defaults: [plain, _self_]\ndata: {_target_: mlotool.data.Digits, augment: true}\n")
    assert list(node("mine", "data")) == DIGITS
    assert node("mine", "data")["augment"] is True


def test_a_recipe_that_inherits_adds_to_the_inherited_node(own: Write) -> None:
    assert node("heir", "data") == {"_target_": "mypackage.Data", "root": "y"}


@pytest.mark.parametrize("recipe", ["own", "heir"])
def test_an_option_of_the_command_line_wins_whole(own: Write, recipe: str) -> None:
    assert node(recipe, "data", "data=mnist") == node("plain", "data", "data=mnist")
    # Also the default one, and one that inherits from another.
    assert list(node(recipe, "data", "data=digits")) == DIGITS
    assert node(recipe, "data", "data=digits_noisy") == node("plain", "data", "data=digits_noisy")


def test_an_option_of_the_recipe_that_inherits_wins_over_the_inherited_node(own: Write) -> None:
    assert node("chooser", "data") == {**node("plain", "data", "data=mnist"), "root": "y"}
    assert node("chooser", "data", "data=cifar10") == {**node("plain", "data", "data=cifar10"), "root": "y"}


def test_single_keys_of_the_command_line_change_single_keys(own: Write) -> None:
    assert node("own", "data", "data.root=z") == {"_target_": "mypackage.Data", "root": "z"}
    assert node("own", "data", "data=mnist", "data.root=z")["root"] == "z"
    assert list(node("plain", "data", "data._target_=mypackage.Data")) == DIGITS


def test_a_node_on_the_command_line_begins_anew(own: Write) -> None:
    adam = "problems.classifier.optimizer={_target_: torch.optim.Adam, lr: 0.5}"
    assert node("plain", "problems.classifier.optimizer", adam) == {"_target_": "torch.optim.Adam", "lr": 0.5}
    assert node("plain", "data", "data={_target_: mypackage.Data}") == {"_target_": "mypackage.Data"}
    sgd = "problems.classifier.optimizer={_target_: torch.optim.SGD, lr: 0.5}"
    assert node("plain", "problems.classifier.optimizer", sgd)["momentum"] == 0.9


def test_a_node_inside_a_node(write_recipe: Write) -> None:
    cg = "hypergradient: {solver: {_target_: mlotool.hypergradient.ConjugateGradient, max_iterations: 7}}\n"
    write_recipe(f"defaults: [mwn, _self_, {{override /hypergradient: neumann}}]\n{cg}")
    mine = node("mine", "hypergradient")
    assert mine["_target_"] == "mlotool.hypergradient.Implicit"
    assert mine["solver"] == {"_target_": "mlotool.hypergradient.ConjugateGradient", "max_iterations": 7}
    # What was chosen on the command line has a solver of its own, unless it is that one.
    assert node("mine", "hypergradient", "hypergradient=neumann") == node(
        "mwn", "hypergradient", "hypergradient=neumann"
    )
    assert node("mine", "hypergradient", "hypergradient=cg")["solver"]["max_iterations"] == 7


@pytest.mark.parametrize(
    ("place", "group"),
    [("problems.classifier.module", "model"), ("problems.classifier.optimizer", "optimizer")],
)
def test_nodes_of_a_problem(write_recipe: Write, place: str, group: str) -> None:
    _, problem, kind = place.split(".")
    write_recipe(f"defaults: [plain, _self_]\nproblems: {{{problem}: {{{kind}: {{_target_: mine.X, a: 1}}}}}}\n")
    assert node("mine", place) == {"_target_": "mine.X", "a": 1}
    option = "linear" if group == "model" else "adamw"
    assert node("mine", place, f"{group}@{place}={option}") == node("plain", place, f"{group}@{place}={option}")


def test_a_choice_that_is_added_last_begins_anew(write_recipe: Write) -> None:
    write_recipe("defaults: [mwn, _self_]\nproblems: {classifier: {hypergradient: {_target_: mine.X, a: 1}}}\n")
    place = "problems.classifier.hypergradient"
    added = node("mine", place, f"+hypergradient@{place}=first_order")
    assert added == {"_target_": "mlotool.hypergradient.FirstOrder"}


def test_roles_stay_where_a_loss_changes_unless_they_are_written_anew() -> None:
    old = {"_target_": "A", "roles": {"model": "a", "weigher": "b"}, "normalize": True}
    below = {"problems": {"a": {"loss": old}}}
    above = {"problems": {"a": {"loss": {"_target_": "B"}}}}
    [places, _] = dropped_places([Layer(below), Layer(above)])
    assert without(below, places) == {"problems": {"a": {"loss": {"roles": old["roles"]}}}}
    anew = {"problems": {"a": {"loss": {"_target_": "B", "roles": {"model": "a"}}}}}
    [places, _] = dropped_places([Layer(below), Layer(anew)])
    assert without(below, places) == {"problems": {"a": {"loss": {}}}}


def test_another_application_of_hydra_merges_as_hydra_does(tmp_path: Path) -> None:
    """The rule is mlotool's: who uses Hydra beside it, in the same process, sees nothing of it."""
    compose("plain")
    (tmp_path / "group").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [{group: one}, _self_]\ngroup: {_target_: b, y: 2}\n")
    (tmp_path / "group" / "one.yaml").write_text("_target_: a\nx: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), **VERSION_KEYWORDS):
        config = hydra.compose("config")
    assert config == {"group": {"_target_": "b", "x": 1, "y": 2}}


def test_the_loader_is_called_in_the_ways_of_two_versions_of_hydra() -> None:
    """Hydra 1.3 gives it overrides as texts, 1.4 the parsed ones beside them."""
    words = ["+recipe=plain", "problems.classifier.optimizer={_target_: torch.optim.Adadelta, rho: 0.8}"]
    expected = compose("plain", words[1:])
    assert expected.problems.classifier.optimizer == {"_target_": "torch.optim.Adadelta", "rho": 0.8}
    with hydra.initialize_config_dir(str(package_dir("conf")), **VERSION_KEYWORDS):
        loader: Any = GlobalHydra.instance().config_loader()
        parsed = OverridesParser.create().parse_overrides(words)
        for load, more in (
            (loader.load_configuration, {}),
            (loader._load_configuration_impl, {"parsed_overrides": parsed}),
        ):
            config = load(CONFIG_NAME, words, RunMode.RUN, from_shell=False, **more)
            assert {key: config[key] for key in config if key != "hydra"} == expected
