"""`mlotool show`: what a recipe sets, and nothing that it needs is left out."""

from pathlib import Path

import pytest
import yaml

import mlotool
from mlotool.config import list_recipes
from mlotool.config.composition import plain
from tests.cli.conftest import Call, Recipe

BUILT_IN = Path(mlotool.__file__).parents[1] / "recipes"
QUICK = ("plain", "learned_lr", "label_correction_paper", "domain_adaptation")
RECIPES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in (recipe.name for recipe in list_recipes() if recipe.path.parent == BUILT_IN)
]


@pytest.mark.parametrize("name", RECIPES)
def test_only_defaults_are_left_out(call: Call, tmp_path: Path, name: str) -> None:
    """What is shown makes the same config, were it a recipe."""
    code, out, _ = call("show", name)
    assert code == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(f"# @package _global_\n{out}")
    assert plain(mlotool.compose(str(shown))) == plain(mlotool.compose(name))


def test_shows_what_is_set_and_no_more(call: Call) -> None:
    words = ["mwn", "seed=3", "runner.log_every=7", "hypergradient=cg", "problems.classifier.optimizer.lr=0.5"]
    _, out, _ = call("show", *words)
    shown = yaml.safe_load(out)
    assert shown["seed"] == shown["data"]["seed"] == 3
    assert shown["runner"] == {"max_ticks": 2000, "log_every": 7}
    assert shown["hypergradient"]["solver"]["_target_"].endswith(".ConjugateGradient")
    assert shown["problems"]["classifier"]["optimizer"]["lr"] == 0.5
    assert shown["problems"]["classifier"]["stream"] == {"split": "train", "batch_size": 100}
    assert not {"logger", "debug", "sweep", "resume"} & set(shown)
    assert "options: data=digits_noisy, hypergradient=cg," in out
    assert f"mlotool show {' '.join(words)} --all" in out.splitlines()[0] and len(out.splitlines()) < 70
    assert "reweight -->|shapes| classifier" in out


def test_all_shows_everything(call: Call) -> None:
    _, out, _ = call("show", "mwn", "--all")
    assert yaml.safe_load(out) == plain(mlotool.compose("mwn"))


def test_what_is_inherited_is_shown_and_named(call: Call, recipe: Recipe) -> None:
    _, out, _ = call("show", str(recipe("seed: 3\nlogger: {project: mine}\n")))
    shown = yaml.safe_load(out)
    assert "# inherits: plain" in out
    assert (shown["name"], shown["seed"], shown["logger"]) == ("plain", 3, {"project": "mine"})
    assert "classifier" in shown["problems"]
    # Without solutions there are no hypergradients.
    assert "hypergradient" not in shown


def test_another_target_keeps_keys_until_they_are_deleted(call: Call) -> None:
    place = "problems.classifier.optimizer"
    deleted = [f"~{place}.{key}" for key in ("momentum", "weight_decay", "nesterov")]
    _, out, _ = call("show", "plain", *deleted, f"{place}={{_target_: torch.optim.Adam, lr: 0.1}}")
    assert yaml.safe_load(out)["problems"]["classifier"]["optimizer"] == {"_target_": "torch.optim.Adam", "lr": 0.1}
