"""The evaluation of a loss before the first tick."""

import torch

from mlotool import Graph, Problem, Program


def test_a_frozen_parameter_was_there_before() -> None:
    layer = torch.nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    problem = Problem("w", layer, lambda batch, *, w: w(batch).square().mean(), roles={"w": "w"})
    loss = Program([problem], Graph()).rehearse("w", torch.ones(3, 2)).loss
    assert loss.requires_grad
    assert not layer.bias.requires_grad
