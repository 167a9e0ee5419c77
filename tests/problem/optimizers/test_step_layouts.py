"""Gradients in any memory order make the same step; options of torch's optimizers make torch's, or are refused."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Problem, Program
from mlotool.core.errors import ConfigError
from tests.program.small import run_ticks
from tests.programs import Point


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
        problem = Problem("a", module, lambda batch, **roles: None, optimizer=lambda p: optimizer(p, fused=fused))
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
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    problem = Problem("a", module, lambda batch, **roles: None, optimizer=sgd)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, fused=False)
    for number in range(4):
        gradient = [None if number == 0 and place < 2 else torch.ones_like(x) for place, x in enumerate(problem.own)]
        problem.step(gradient)
        for parameter, slope in zip(theirs.parameters(), gradient, strict=True):
            parameter.grad = slope
        optimizer.step()
    for own, other in zip(problem.own, theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other)


START = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def loss(batch: Any, *, w: Any, scale: Any = None) -> Tensor:
    factor = 1.0 if scale is None else scale().exp().sum()
    return factor * ((w() - 1.0) ** 2 + 0.1 * w() ** 4).sum()


OPTIONS = [{"maximize": True}, {"foreach": True}, {"fused": True}, {"foreach": False, "maximize": True}]
MAKES = {
    f"{optimizer.__name__}{options}": partial(optimizer, lr=0.01, **options)
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for options in OPTIONS
}


@pytest.mark.parametrize("trace", [None, "eager"])
def test_steps_are_those_of_torch(trace: str | None) -> None:
    """Of problems beside each other, one with each optimizer."""
    problems = [Problem(name, Point(START), loss, roles={"w": name}, optimizer=make) for name, make in MAKES.items()]
    program = run_ticks(Program(problems, Graph(), trace=trace, trace_from=1), 6).program
    for name, make in MAKES.items():
        other = Point(START)
        step = make(list(other.parameters()))
        for _ in range(6):
            step.zero_grad()
            loss(None, w=other).backward()
            step.step()
        assert torch.allclose(program.problems[name].theta["x"], other.x, rtol=1e-12), name


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam])
def test_differentiable_is_refused_when_the_problem_is_made(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"w.optimizer.differentiable: found True; expected false"):
        Problem("w", Point(START), loss, roles={"w": "w"}, optimizer=partial(optimizer, lr=0.1, differentiable=True))
