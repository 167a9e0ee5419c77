"""States, adjoints and parameters that converge together (arXiv 1812.04352, section 4)."""

from functools import partial
from typing import Any

import pytest
import torch

from mlotool.layerparallel import Multigrid
from tests.layerparallel.multigrid.test_residual import Wave
from tests.layerparallel.multigrid.test_setting import network, problem, train

# One iteration a tick, with as many trial steps as its line search wants.
lbfgs = partial(torch.optim.LBFGS, max_iter=1, max_eval=20, history_size=10, line_search_fn="strong_wolfe")
adam = partial(torch.optim.Adam, lr=0.02)


@pytest.mark.parametrize(
    ("optimizer", "batch_size", "steps"),
    [(lbfgs, 12, 15), (adam, 4, 40)],
    ids=["lbfgs", "adam"],
)
def test_inexact_gradients_train_as_well_as_the_serial_ones(optimizer: Any, batch_size: int, steps: int) -> None:
    settings = {"optimizer": optimizer, "batch_size": batch_size}
    parallel = Multigrid(cycles=2, backward_cycles=2, warm_start=True)
    mine = train(problem(parallel, network(Wave(32, h=0.03)), **settings), steps)
    serial = train(problem(None, network(Wave(32, h=0.03)), **settings), steps)
    epoch = 12 // batch_size
    last, expected = (sum(losses[-epoch:]) / epoch for losses in (mine, serial))
    assert last < 0.5 * mine[0]
    assert last < 1.1 * expected
    assert parallel.statistics()["forward_residual_2"] > 1e-9


RECIPE = """# @package _global_
# Residual layers, one-shot.
defaults:
  - _self_
  - override /data: digits
name: one_shot
problems:
  classifier:
    module:
      _target_: torch.nn.Sequential
      _args_:
        - {_target_: torch.nn.Flatten}
        - {_target_: torch.nn.Linear, in_features: 64, out_features: 4}
        - _target_: torch.nn.Sequential
          _args_:
            - {_target_: torch.nn.Sequential, _args_: [{_target_: torch.nn.Linear, in_features: 4, out_features: 4}]}
            - {_target_: torch.nn.Tanh}
            - {_target_: torch.nn.Tanh}
            - {_target_: torch.nn.Tanh}
        - {_target_: torch.nn.Linear, in_features: 4, out_features: 10}
    loss:
      _target_: mlotool.losses.depth_regularized_cross_entropy
      roles: {model: classifier}
      h: 1.0
      tikhonov: 1.0e-4
    stream: {split: train, batch_size: 100}
    optimizer: {_target_: torch.optim.LBFGS, max_iter: 1, max_eval: 20, line_search_fn: strong_wolfe}
    parallel:
      _target_: mlotool.layerparallel.Multigrid
      part: "2"
      coarsening: 2
      cycles: 2
      backward_cycles: 1
      warm_start: true
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: end}, batch_size: 100}
objective: val/accuracy
logger: {wandb: false}
debug: {limit_samples: 100}
runner: {max_ticks: 3, progress_bar: false, log_every: 1, report: false}
"""
