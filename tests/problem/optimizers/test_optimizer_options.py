"""Options of torch's optimizers: they take torch's steps, or are refused with what to write."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import Graph, Problem, Program, Schedule
from mlotool.core.errors import ConfigError
from tests.programs import Point

START = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def loss(batch: Any, *, w: Any, scale: Any = None) -> Tensor:
    factor = 1.0 if scale is None else scale().exp().sum()
    return factor * ((w() - 1.0) ** 2 + 0.1 * w() ** 4).sum()


def problem(optimizer: Any, **settings: Any) -> Problem:
    return Problem("w", Point(START), loss, roles={"w": "w"}, optimizer=optimizer, **settings)


@pytest.mark.parametrize("trace", [None, "eager"])
@pytest.mark.parametrize(
    "options", [{"maximize": True}, {"foreach": True}, {"fused": True}, {"foreach": False, "maximize": True}], ids=str
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_are_those_of_torch(optimizer: Any, options: dict[str, Any], trace: str | None) -> None:
    made = partial(optimizer, lr=0.01, **options)
    program = Program([problem(made)], Graph(), trace=trace, trace_from=1)
    schedule, other = Schedule(program), Point(START)
    step = made(list(other.parameters()))
    for _ in range(8):
        schedule.tick()
        step.zero_grad()
        loss(None, w=other).backward()
        step.step()
    assert torch.allclose(program.problems["w"].theta["x"], other.x, rtol=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam])
def test_differentiable_is_refused_when_the_problem_is_made(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"w.optimizer.differentiable: found true; expected false"):
        problem(partial(optimizer, lr=0.1, differentiable=True))


def test_an_error_of_a_step_that_is_none_of_these_stays() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Schedule(Program([problem(partial(Failing, lr=0.1))], Graph())).tick()
