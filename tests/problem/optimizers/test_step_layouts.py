"""Gradients in any memory order make the same step."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from mlotool import Problem


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["expanded", "transposed", "channels_last"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_does_not_depend_on_the_gradients_strides(
    optimizer: type[torch.optim.Optimizer], order: str, fused: bool
) -> None:
    shape = (4, 3, 2, 2)
    values = torch.randn(1).expand(shape) if order == "expanded" else torch.randn(shape).transpose(0, 1).contiguous()
    gradient = values.transpose(0, 1) if order == "transposed" else values.reshape(shape)
    start = torch.randn(shape)
    ends = []
    for each in (gradient, gradient.contiguous()):
        module = nn.Module()
        module.weight = nn.Parameter(start.clone())
        if order == "channels_last":
            module = module.to(memory_format=torch.channels_last)
        problem = Problem(
            "a", module, lambda batch, *, a: a().sum(), roles={"a": "a"}, optimizer=lambda p: optimizer(p, fused=fused)
        )
        problem.step([each])
        ends.append(problem.theta["weight"].detach() - start)
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    reference = nn.Parameter(start.clone())
    reference.grad = gradient.contiguous()
    optimizer([reference]).step()
    assert torch.allclose(ends[0], reference.detach() - start, atol=1e-6)


def test_a_parameter_whose_first_gradient_comes_later() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    theirs = copy.deepcopy(module)
    problem = Problem(
        "a", module, lambda batch, **roles: None, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, fused=False)
    for number in range(4):
        gradient = [None if number == 0 and place < 2 else torch.ones_like(x) for place, x in enumerate(problem.own)]
        problem.step(gradient)
        for parameter, slope in zip(theirs.parameters(), gradient, strict=True):
            parameter.grad = slope
        optimizer.step()
    for own, other in zip(problem.own, theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other)
