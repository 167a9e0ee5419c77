"""Deep copies of problems and programs go on by themselves, whatever the original has cached."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.hypergradient import Identity, Implicit
from mlotool.program import Graph, Problem, Program, Schedule
from tests import programs


def program(optimizer: Any, trace: str | None) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    batch = programs.matrix(3)

    def fit(_: Any, *, w: Any, u: Any) -> Tensor:
        return ((w(batch).squeeze(-1) - u()) ** 2).mean()

    def judge(_: Any, *, w: Any) -> Tensor:
        return (w(batch) ** 2).sum()

    roles = {"w": "w", "u": "u"}
    lower = Problem("w", net, fit, roles=roles, optimizer=optimizer, hypergradient=Implicit(Identity()))
    upper = Problem(
        "u", programs.Point(programs.vector(1)), judge, roles={"w": "w"}, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    return Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}), trace=trace)


def parameters(made: Program) -> list[Tensor]:
    return [tensor.detach().clone() for each in made.problems.values() for tensor in each.theta.values()]


@pytest.mark.parametrize(
    ("optimizer", "trace"),
    [(partial(torch.optim.SGD, lr=0.1, momentum=0.9), None), (torch.optim.AdamW, None), (torch.optim.AdamW, "eager")],
    ids=["momentum", "adamw", "traced"],
)
def test_a_copy_of_a_program_goes_on_as_the_original_would_and_leaves_it_alone(
    optimizer: Any, trace: str | None
) -> None:
    made = program(optimizer, trace)
    schedule = Schedule(made)
    for _ in range(4):
        schedule.tick()
    before = parameters(made)
    copied = copy.deepcopy(made)
    other = Schedule(copied)
    for _ in range(4):
        other.tick()
    assert all(map(torch.equal, parameters(made), before))
    for _ in range(4):
        schedule.tick()
    torch.testing.assert_close(parameters(made), parameters(copied), rtol=1e-12, atol=1e-12)
    assert not all(map(torch.equal, parameters(made), before))
