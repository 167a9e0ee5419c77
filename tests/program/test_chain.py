"""What a chain of problems costs, each of which shapes and reads the next: counted in evaluations of losses."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Identity, Implicit, Problem, Program, Schedule


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(0.1 * torch.randn(3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x


def chain(length: int, curvature: Any, calls: list[str]) -> Schedule:
    torch.manual_seed(0)
    names = [f"p{number}" for number in range(length)]

    def make(number: int) -> Problem:
        roles = {"own": number, "upper": number - 1, "lower": number + 1}
        played = {role: names[at] for role, at in roles.items() if 0 <= at < length}

        def loss(batch: Any, *, own: Any, upper: Any = None, lower: Any = None) -> Tensor:
            calls.append(names[number])
            value = ((own() - 1.0) ** 2).sum()
            for other in (upper, lower):
                value = value if other is None else value + (own() * other()).sum() ** 2
            return value

        step = partial(torch.optim.SGD, lr=1e-3)
        implicit = Implicit(Identity(0.1), curvature=curvature) if number else None
        return Problem(names[number], Point(), loss, roles=played, optimizer=step, hypergradient=implicit)

    shapes = {upper: [lower] for upper, lower in pairwise(names)}
    reads = {lower: [upper] for upper, lower in pairwise(names)}
    return Schedule(Program([make(number) for number in range(length)], Graph(shapes, reads)))


@pytest.mark.parametrize("length", [2, 3, 5, 8])
@pytest.mark.parametrize("curvature", ["total", "partial"])
def test_a_tick_of_a_chain_evaluates_each_loss_once_a_gradient(length: int, curvature: str) -> None:
    """Exact, `n (n + 1) / 2`: the gradient of a problem needs products with the derivatives of all below it, and each
    product evaluates its loss; with partial curvature `2 n - 1`, since a gradient stops at the next."""
    calls: list[str] = []
    schedule = chain(length, curvature, calls)
    schedule.tick()
    calls.clear()
    schedule.tick()
    assert len(calls) == (length * (length + 1) // 2 if curvature == "total" else 2 * length - 1)
    once = {name: calls.count(name) for name in schedule.program.problems}
    assert once == {f"p{n}": n + 1 if curvature == "total" else min(n + 1, 2) for n in range(length)}
