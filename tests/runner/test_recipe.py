"""A recipe from its name to a module of the finished run."""

import json
from copy import copy
from pathlib import Path

import pytest
import torch

import mlotool
from mlotool.config import Origin, find_recipe
from mlotool.config.composition import origin_of
from mlotool.runner import evaluate, load

OVERRIDES = (
    "runner.max_ticks=4",
    "runner.progress_bar=false",
    "logger.wandb=false",
    "evaluate.splits.val=2",
    "debug.limit_warmup_steps=0",
)


def test_a_run_from_python_knows_where_its_config_came_from(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "runner.max_ticks=1"]
    mlotool.run(mlotool.compose("mwn", overrides), output_dir=tmp_path)
    assert (tmp_path / "overrides.txt").read_text().split() == overrides
    assert (tmp_path / "recipe.yaml").read_text() == find_recipe("mwn").read_text()
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["recipe_path"] == str(find_recipe("mwn"))
    assert provenance["command"].startswith("mlotool.run(mlotool.compose('mwn', ['runner.max_ticks=4', ")


def test_the_origin_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(find_recipe("plain").read_text())
    config = mlotool.compose(str(file), ["seed=1"])
    config.seed = 2
    origin = origin_of(config)
    assert origin is not None
    assert (origin.recipe_path, origin.overrides) == (file, ("seed=1",))
    by_override = mlotool.compose(None, ["+recipe=mwn"])
    origin = origin_of(by_override)
    assert origin is not None
    assert origin.recipe_path == find_recipe("mwn")
    assert origin_of(copy(config)) is None


def test_a_recipe_runs_and_its_run_folder_gives_the_module_back(tmp_path: Path) -> None:
    recipe = find_recipe("mwn")
    config = mlotool.compose("mwn", OVERRIDES)
    result = mlotool.run(config, output_dir=tmp_path, origin=Origin("mlotool run", OVERRIDES, recipe))
    assert set(result.metrics) >= {"classifier/loss", "reweight/loss", "val/accuracy", "test/accuracy"}
    assert (tmp_path / "overrides.txt").read_text().split() == list(OVERRIDES)
    assert (tmp_path / "recipe.yaml").read_text() == recipe.read_text()
    assert evaluate(tmp_path, "test")["test/accuracy"] == result.metrics["test/accuracy"]
    classifier = load(tmp_path, "classifier")
    assert isinstance(classifier, torch.nn.Module)
    assert result.objective == pytest.approx(evaluate(tmp_path, "val")["val/accuracy"])
