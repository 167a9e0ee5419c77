"""A recipe from its name to a module of the finished run."""

from pathlib import Path

import pytest
import torch

import mlotool
from mlotool.config import Origin, find_recipe
from mlotool.runner import evaluate, load

OVERRIDES = (
    "runner.max_ticks=4",
    "runner.progress_bar=false",
    "logger.wandb=false",
    "evaluate.splits.val=2",
    "debug.limit_warmup_steps=0",
)


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
