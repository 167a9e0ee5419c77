"""Runs on the device come to their end."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mlotool
from mlotool import LossOutput
from mlotool.runner import run_config
from tests.runner.tiny import lower_loss, make_built, make_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["mwn", "maml", "learned_lr", "multigrid_peaks"])
def test_a_recipe_runs(recipe: str, accelerator: str, tmp_path: Path) -> None:
    overrides = ["debug=fast", "logger=csv", "runner.progress_bar=false", f"runner.accelerator={accelerator}"]
    result = mlotool.run(mlotool.compose(recipe, overrides), output_dir=tmp_path / "run")
    steps = [value for key, value in result.metrics.items() if key.endswith("/step")]
    assert min(steps) >= 1
    assert result.objective is not None
    assert all(map(math.isfinite, [result.objective, *result.metrics.values()]))
    assert result.checkpoint is not None


def test_a_metric_may_be_on_the_cpu(accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss may count what it likes: with torch.tensor(number), which is on the CPU."""

    def counted(batch: Mapping[str, Tensor], **roles: Any) -> LossOutput:
        output = lower_loss(batch, **roles)
        return LossOutput(output.loss, {**output.metrics, "size": torch.tensor(float(len(batch["target"])))})

    monkeypatch.setattr(run_config, "build", lambda config, reduce=None, shared=None: make_built(counted))
    config = make_config(**{"runner.accelerator": accelerator, "runner.max_ticks": 10})
    result = mlotool.run(config, output_dir=tmp_path / "run")
    assert result.metrics["classifier/size"] == 8
