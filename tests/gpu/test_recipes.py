"""Runs on the device come to their end, and go on bit by bit where they were stopped."""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mlotool
from mlotool import EvolutionStrategies, LossOutput
from mlotool.runner import run_config
from tests.runner import test_resume as on_the_cpu
from tests.runner.algorithms import ALGORITHMS, tiny
from tests.runner.tiny import Built, lower_loss, make_built, make_config

go, at_every_tick = on_the_cpu.go, on_the_cpu.at_every_tick

# All have a layer of dropout; the steps that are recorded are in the middle of an unroll at tick 13.
NAMES = (
    *("finite_difference", "cg_with_warm_start", "unrolled", "unrolled_with_kept_graphs"),
    *("penalty", "saba", "roll_back", "tasks"),
)
CASES: dict[str, tuple[Callable[[], Built], dict[str, Any]]] = {
    **{name: ALGORITHMS[name] for name in NAMES},
    "persistent_evolution": (tiny(lambda: EvolutionStrategies(num_pairs=2, persistent=True), unroll_steps=2), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_resumes_bit_identically(
    go: Callable[..., Any], tmp_path: Path, at_every_tick: dict[str, Any], name: str, accelerator: str
) -> None:
    build, changes = CASES[name]
    changes = {**changes, "runner.accelerator": accelerator}
    whole = go("whole", changes, build=build).output_dir
    dense = go("dense", {**changes, **at_every_tick}, build=build).output_dir
    on_the_cpu.assert_same(dense, whole)
    parts = tmp_path / "parts"
    shutil.copytree(dense, parts)
    (parts / "summary.json").unlink()
    go(None, changes, build=build, resume=parts / "checkpoints/tick_13.ckpt")
    on_the_cpu.assert_same(parts, whole)


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
