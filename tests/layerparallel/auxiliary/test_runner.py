"""Through the runner: a recipe whose classifier is trained by stages, in one process and in one a stage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool
from mlotool.config import build
from mlotool.program import Schedule
from mlotool.runner.checkpoint import read_checkpoint
from tests.layerparallel.auxiliary.test_processes import assert_equal

QUIET = ["logger.wandb=false", "runner.progress_bar=false", "runner.report=false", "debug.limit_samples=60"]
STAGES = "+problems.classifier.parallel={_target_: mlotool.layerparallel.Auxiliary, stages: 2, record: 2, beta: 50.0"

# A perceptron of three layers cannot be balanced.
pytestmark = pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")


def run(folder: Path, recipe: str, parallel: str, *words: str) -> tuple[dict[str, float], dict[str, Any], Path]:
    """Return metrics, the program's state in the last checkpoint, and the run folder."""
    config = mlotool.compose(recipe, [*QUIET, "runner.max_ticks=6", "runner.log_every=3", STAGES + parallel, *words])
    result = mlotool.run(config, output_dir=folder)
    return result.metrics, read_checkpoint(folder / "checkpoints" / "last.ckpt")["program"], folder


def test_a_recipe_in_one_process_logs_violations_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    networks = ", variables: auxnet, beta: {start: 10.0, factor: 2.0, every: 2}, noise: 0.01}"
    metrics, state, folder = run(tmp_path / "whole", "mwn", networks)
    assert metrics["classifier/violation_1"] > 0
    assert 0 < metrics["classifier/relative_violation_1"] < 10
    assert metrics["classifier/beta"] == 40.0
    timeline = json.loads((folder / "artifacts" / "parallel_classifier.json").read_text())
    assert timeline["stages"] == 2
    assert {span["what"] for span in timeline["spans"]} == {"forward", "backward", "communication", "auxnet"}
    half = mlotool.compose("mwn", [*QUIET, "runner.max_ticks=3", "runner.log_every=3", STAGES + networks])
    mlotool.run(half, output_dir=tmp_path / "halves")
    half.runner.max_ticks = 6
    mlotool.run(half, output_dir=tmp_path / "halves", resume=tmp_path / "halves")
    resumed = read_checkpoint(tmp_path / "halves" / "checkpoints" / "last.ckpt")["program"]
    assert_equal(resumed, state)


def test_the_noise_of_a_recipe_has_a_seed_of_its_own_and_no_script_changes_it() -> None:
    """As `mlotool.load` and `build` give it; the first step makes the stages, and the second one draws."""

    def parameters(global_seed: int) -> list[torch.Tensor]:
        torch.manual_seed(global_seed)
        program = build(mlotool.compose("plain", [*QUIET, f"{STAGES}, noise: 0.5}}"])).program
        program.random.manual_seed(0)
        schedule = Schedule(program)
        schedule.tick()
        schedule.tick()
        return [tensor.detach().clone() for tensor in program.problems["classifier"].module.parameters()]

    first, second = parameters(1), parameters(2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.slow
def test_two_processes_alone_are_one_bit_by_bit(tmp_path: Path) -> None:
    words = "model@problems.classifier.module=resnet8"
    one = run(tmp_path / "one", "plain", "}", words)
    two = run(tmp_path / "two", "plain", ", processes: true}", words, "runner.devices=2")
    assert_equal(two[1], one[1])
    assert two[0] == one[0]
    timeline = json.loads((two[2] / "artifacts" / "parallel_classifier.json").read_text())
    assert {span["rank"] for span in timeline["spans"]} == {0, 1}
    assert timeline["processes"] == 2
