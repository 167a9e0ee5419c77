"""Runs on two ranks, each of which draws paths of its own through a shared space, that are killed and go on."""

import random
from pathlib import Path

import pytest
import torch

from mlotool.runner.checkpoint import read_checkpoint
from tests.runner.test_kills_of_ranks import MAX_TICKS, SETTINGS, finish, kill, last_tick, run_of
from tests.runner.test_launcher import run

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")

# Slow enough for a kill to meet it, and with a checkpoint at each flush.
MODULE = """
import time

from torch import nn

from mlotool.runner import checkpoint

checkpoint.LARGEST_SHARE_OF_TIME = float("inf")


class Slow(nn.Flatten):
    def forward(self, x):
        time.sleep(0.004)
        return super().forward(x)


class Net(nn.Sequential):
    def __init__(self):
        layers = [nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh()]
        super().__init__(Slow(), *layers, nn.Linear(16, 10))
"""
RECIPE = """# @package _global_
# A test's recipe.
defaults:
  - /optimizer@problems.classifier.optimizer: adam
  - _self_
  - override /data: digits
name: killed
data: {sizes: {train: 100, meta: 100, val: 100, test: 100}}
problems:
  classifier:
    module:
      _target_: mlotool.spaces.Space
      shared: true
      base: {_target_: slow.Net}
      inputs: ${data.image_shape}
      paths: {_target_: mlotool.spaces.PATHS}
      mutators:
        - _target_: mlotool.spaces.Operator
          name: activation
          at: {type: Tanh}
          candidates:
            tanh: null
            linear: {_target_: torch.nn.Linear, in_features: 16, out_features: 16}
            relu: {_target_: torch.nn.ReLU}
    loss: {_target_: mlotool.losses.cross_entropy, roles: {model: classifier}}
    stream: {split: train, batch_size: 20}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 15}}
objective: null
"""
WHOM = ("one", "all")


def words_of(folder: Path, paths: str) -> tuple[str, ...]:
    """Write what the run needs; return what follows `mlotool run`."""
    folder.mkdir()
    (folder / "slow.py").write_text(MODULE)
    (folder / "killed.yaml").write_text(RECIPE.replace("PATHS", paths))
    return "killed.yaml", "--trust", "slow", *SETTINGS


def counts_by_rank(folder: Path) -> list[torch.Tensor]:
    """Return how often each rank has computed each candidate."""
    state = read_checkpoint(run_of(folder) / "checkpoints" / "last.ckpt")
    first = state["program"]["classifier"]["module"]["counts"]
    return [first, *(each["buffers"]["classifier"]["counts"] for each in state["random_states"][1:])]


@pytest.mark.slow
@pytest.mark.parametrize("paths", ["UniformPaths", "FairPaths"])
def test_two_ranks_that_draw_paths_are_killed(tmp_path: Path, paths: str) -> None:
    """Parameters, records and each rank's paths are those of a run that nothing has stopped."""
    whole, folder = tmp_path / "whole", tmp_path / "parts"
    code, _, err = run(whole, *words_of(whole, paths))
    assert code == 0, err
    chance, words = random.Random(paths), words_of(folder, paths)
    for whom in WHOM:
        assert kill(folder, words, whom, 7, chance.uniform(0, 0.1))
    assert last_tick(folder) < MAX_TICKS
    # Both ranks' buffers and random numbers are in the checkpoint that is compared.
    finish(folder, [*words, f"resume={run_of(folder).relative_to(folder)}"], run_of(whole))
    first, second = counts_by_rank(folder)
    # Two decisions are made a tick.
    assert first.sum() == second.sum() == 2 * MAX_TICKS
    if paths == "UniformPaths":
        assert not torch.equal(first, second)
    else:
        assert first.unique().tolist() == second.unique().tolist() == [MAX_TICKS // 3]
