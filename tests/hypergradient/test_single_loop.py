"""SOBA and SABA against plain loops: the order that their docstrings state, and the paper's, which ends the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import SABA, FixedPoint, Graph, Implicit, Problem, Program, Schedule

A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
TARGET = torch.tensor([0.3, -0.7], dtype=torch.float64)
RATE, STEP, UPPER_RATE = 0.2, 0.3, 0.1


class Point(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x


def lower(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * theta @ A @ theta - theta @ x + 0.1 * (theta**4).sum() + 0.05 * (x**2 * theta**2).sum()


def upper(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * ((theta - TARGET) ** 2).sum() + 0.01 * (x**2).sum()


def by_hand(num_steps: int, *, is_papers: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return theta, q and x of algorithm 1 of Dagreou et al. 2022 on full batches, or in the order of a tick."""
    theta, x = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    q = torch.zeros_like(theta)
    for _ in range(num_steps):
        moved = theta - RATE * torch.autograd.functional.jacobian(lower, (theta, x))[0]
        at = theta if is_papers else moved
        (hessian, _), (cross, _) = torch.autograd.functional.hessian(lower, (at, x))
        slope, direct = torch.autograd.functional.jacobian(upper, (at, x))
        after = q - STEP * (hessian @ q - slope)
        x = x - UPPER_RATE * (direct - cross @ (q if is_papers else after))
        theta, q = moved, after
    return theta, q, x


def program(algorithm: Any) -> Program:
    def low(batch: Any, *, w: Any, x: Any) -> Tensor:
        return lower(w(), x())

    def high(batch: Any, *, w: Any, x: Any) -> Tensor:
        return upper(w(), x())

    modules = {"w": Point(0.5, 0.5), "x": Point(1.0, -1.0)}
    rates = {"w": RATE, "x": UPPER_RATE}
    sgd = {name: torch.optim.SGD(module.parameters(), lr=rates[name]) for name, module in modules.items()}
    roles = {"w": "w", "x": "x"}
    problems = [
        Problem("w", modules["w"], low, roles=roles, optimizer=sgd["w"], hypergradient=algorithm),
        Problem("x", modules["x"], high, roles=roles, optimizer=sgd["x"]),
    ]
    return Program(problems, Graph({"x": ["w"]}, {"w": ["x"]}))


ALGORITHMS = {"soba": lambda: Implicit(FixedPoint(1, STEP), warm_start=True), "saba": lambda: SABA(STEP)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_iterates_are_those_of_the_stated_order(name: str) -> None:
    made = program(ALGORITHMS[name]())
    schedule = Schedule(made)
    for number in range(1, 21):
        schedule.tick()
        theta, _, x = by_hand(number, is_papers=False)
        assert float((made.problems["w"].theta["x"].detach() - theta).abs().max()) < 1e-10
        assert float((made.problems["x"].theta["x"].detach() - x).abs().max()) < 1e-10


@pytest.mark.slow
def test_the_papers_order_has_the_same_fixed_point_but_other_iterates() -> None:
    assert float((by_hand(5, is_papers=True)[2] - by_hand(5, is_papers=False)[2]).abs().max()) > 1e-3
    ends = [by_hand(2000, is_papers=is_papers) for is_papers in (True, False)]
    for ours, theirs in zip(*ends, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-10
    theta, q, x = ends[0]
    (hessian, _), (cross, _) = torch.autograd.functional.hessian(lower, (theta, x))
    slope, direct = torch.autograd.functional.jacobian(upper, (theta, x))
    assert float(torch.autograd.functional.jacobian(lower, (theta, x))[0].norm()) < 1e-10
    assert float((q - torch.linalg.solve(hessian, slope)).norm()) < 1e-10
    assert float((direct - cross @ q).norm()) < 1e-8
