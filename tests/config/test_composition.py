import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from mlotool.config import check, compose, find_recipe, list_recipes, load_run_config, package_dir, sources
from mlotool.config.composition import is_apart, with_values
from mlotool.core.errors import ConfigError
from tests.config.conftest import message_of
from tests.small_recipes import CIFAR, ELSEWHERE, SMALLER

BUILT_IN = sorted(path.stem for path in package_dir("recipes").glob("*.yaml"))
CHANGED = {*CIFAR, *SMALLER, *ELSEWHERE}
"""Recipes of which the test that runs each one replaces values."""
Write = Callable[..., Path]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [name for name in BUILT_IN if name in CHANGED])
def test_each_recipe_composes_and_is_sound(recipe: str) -> None:
    config = compose(recipe)
    assert config.name == recipe
    assert check(config, targets=True) == []
    assert "hydra" not in config
    assert not GlobalHydra.instance().is_initialized()


def test_what_a_recipe_sets_of_another_text_is_dropped_as_the_messages_say() -> None:
    recipe, own = "lm_loss_weighting", "data=text_folder"
    assert compose(recipe, [own]).data.sha256 is not None
    config = compose(recipe, [own, "~data.sha256", "~data.shares"])
    assert config.data._target_ == "mlotool.data.TextFolder"
    assert not {"sha256", "shares"} & set(config.data)
    assert check(config) == []


def test_every_group_swaps() -> None:
    words = ["hypergradient=cg", "data=cifar10_longtailed", "model@problems.classifier.module=resnet32"]
    config = compose("mwn", [*words, "runner.devices=1", "runner.precision=bf16", "logger=csv", "runner=gpu"])
    assert config.hypergradient.solver._target_ == "mlotool.hypergradient.ConjugateGradient"
    assert (config.data._target_, config.data.imbalance_factor) == ("mlotool.data.CIFAR10", 100)
    module = config.problems.classifier.module
    assert (module.depth, module.num_classes, list(module.image_shape)) == (32, 10, [3, 32, 32])
    assert "hidden" not in module
    assert (config.runner.precision, config.runner.accelerator) == ("bf16", "gpu")
    assert not config.logger.wandb
    assert check(config) == []


def test_one_problem_gets_a_hypergradient_of_its_own_whole() -> None:
    config = compose("mwn", ["+hypergradient@problems.classifier.hypergradient=first_order"])
    assert config.problems.classifier.hypergradient == {"_target_": "mlotool.hypergradient.FirstOrder"}
    assert config.hypergradient.product == "finite_difference"
    assert check(config) == []


def test_a_recipe_inherits_another(write_recipe: Write) -> None:
    write_recipe("defaults: [mwn_cifar10_small, _self_]\nname: mine\nproblems: {classifier: {unroll_steps: 3}}\n")
    config = compose("mine", ["model@problems.classifier.module=resnet56"])
    assert (config.name, config.problems.classifier.unroll_steps) == ("mine", 3)
    assert config.runner == compose("mwn_cifar10_small").runner
    assert config.problems.classifier.module.depth == 56
    assert check(config) == []


def test_a_recipe_is_found_by_its_path(write_recipe: Write, folder: Path) -> None:
    path = write_recipe("defaults: [mwn, _self_]\nname: by_path\n", name="../else where/a, b")
    assert compose(path).name == "by_path"
    assert compose("else where/a, b.yaml").name == "by_path"
    assert "a, b" not in [recipe.name for recipe in list_recipes()]


def test_an_own_recipe_hides_a_built_in_one_and_says_so(write_recipe: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write_recipe("defaults: [plain, _self_]\nname: other\n", name="mwn")
    with caplog.at_level(logging.WARNING, logger="mlotool"):
        assert compose("mwn").name == "other"
    assert str(path) in caplog.text
    assert "hides the built-in recipe 'mwn'" in caplog.text
    assert find_recipe("mwn") == path
    assert [recipe.source for recipe in list_recipes() if recipe.name == "mwn"] == ["./recipes"]
    assert [recipe.path for recipe in sources.loaded_recipes()] == [path, package_dir("recipes") / "plain.yaml"]


@pytest.mark.parametrize("name", ["../mwn", "/etc/passwd", "..", "x/../../mwn", "plain\0", "", "~", "${oc.env:HOME}"])
def test_no_recipe_lies_outside_its_folder(name: str) -> None:
    message = message_of(compose, name)
    assert "recipe: found" in message and os.environ["HOME"] not in message


def test_a_run_folder_gives_its_config_back(folder: Path) -> None:
    config = compose("mwn", ["seed=3"])
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    loaded = load_run_config(folder)
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(config, resolve=True)
    assert check(loaded) == []
    (folder / "config.yaml").write_text("trianer: 1")
    assert "Did you mean 'runner'?" in message_of(load_run_config, folder)
    assert "config.yaml" in message_of(load_run_config, folder / "nowhere")


@pytest.mark.parametrize(("recipe", "overrides"), [(3, []), ("mwn", "seed=1"), ("mwn", [1])])
def test_what_is_no_recipe_or_no_list_of_overrides_is_told(recipe: Any, overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"compose\.(recipe|overrides): found .*; expected a"):
        compose(recipe, overrides)


def test_keys_are_set_below_what_a_recipe_leaves_null() -> None:
    words = ["evaluate=null", "evaluate.problem=classifier", "evaluate={splits: {val: 9}}", "evaluate.batch_size=5"]
    evaluate = compose("mwn", words).evaluate
    assert (evaluate.problem, evaluate.splits, evaluate.batch_size) == ("classifier", {"val": 9}, 5)
    stream = compose("mwn", ["problems.classifier.stream=null", "+problems.classifier.stream.split=val"])
    assert stream.problems.classifier.stream.split == "val"


RATE = "problems.classifier.optimizer.lr"
VALUES = [
    ("plain", ["data=digits_noisy"], [f"{RATE}=1e-3", "seed=7", "data.seed=3", "data.label_noise.rate=0.25"]),
    ("plain", [f"{RATE}=0.3"], ["runner.max_ticks=7", "runner.precision=bf16", "objective='val/accuracy'"]),
    ("mwn", ["hypergradient=cg"], ["hypergradient.solver.max_iterations=3", "problems.reweight.optimizer.lr=1e-5"]),
    ("mwn", [], ["runner.num_threads=1", "evaluate.metrics=[accuracy,cross_entropy]", "sweep.devices=[0,1]",
                 "problems.classifier.gradient_clip_norm=1.0", "problems.classifier.shard=[layers.*]"]),
    ("explore_mnasnet", [], ["problems.classifier.module.base.widths=[8,12]", "sweep.storage=sqlite:///study.db"]),
    ("maml", ["debug=fast"], ["seed=1", "problems.learner.tasks=4", "data.seed=5", "debug.limit_samples=30"]),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "shared", "words"), VALUES)
def test_values_in_a_copy_are_those_of_hydra(recipe: str, shared: list[str], words: list[str]) -> None:
    base = compose(recipe, shared)
    before, found = OmegaConf.to_container(base), with_values(base, words)
    assert OmegaConf.to_container(found) == OmegaConf.to_container(compose(recipe, [*shared, *words]))
    assert OmegaConf.to_container(base) == before


def test_what_is_more_than_a_value_is_left_to_hydra() -> None:
    base = compose("plain", ["evaluate=null", "objective=null"])
    for word in ("data=mnist", f"{RATE.removesuffix('.lr')}=3", "problems.classifier.loss._target_=a.b", "seed=a",
                 "evaluate.batch_size=3", "problems.other.tasks=3", "seed=${data.seed}", "seed=0,1", "~seed",
                 "optimizer@problems.classifier.optimizer=adam", "hydra.job.name=a", "decisions.a=1", "seed=[1]",
                 "evaluate=[1]", "problems.classifier.stream=3", "runner.callbacks=[{a: 1}]", "seeds=1",
                 "runner.num_threads=null"):  # fmt: skip
        assert with_values(base, [word]) is None, word
    assert is_apart(["seed=1", "data.seed=2"], 0)
    assert not is_apart(["data.seed=1", "data={seed: 2}"], 0) and not is_apart(["seed=1", "+seed=2"], 1)
