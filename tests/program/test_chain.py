"""What a chain of problems costs, each of which shapes and reads the next: counted in evaluations of losses."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mlotool import Graph, Identity, Implicit, Problem, Program, Schedule
from tests.program.small import parameters
from tests.programs import Point


def chain(
    length: int, curvature: Any, calls: list[str] | None = None, *, is_coupled: bool = False, trace: str | None = None
) -> Schedule:
    """Return a chain whose losses are sums of a term with each neighbour, or also have a term with both."""
    torch.manual_seed(0)
    names = [f"p{number}" for number in range(length)]

    def make(number: int) -> Problem:
        roles = {"own": number, "upper": number - 1, "lower": number + 1}
        played = {role: names[at] for role, at in roles.items() if 0 <= at < length}

        def loss(batch: Any, *, own: Any, upper: Any = None, lower: Any = None) -> Tensor:
            if calls is not None:
                calls.append(names[number])
            value = ((own() - 1.0) ** 2).sum()
            for other in (upper, lower):
                value = value if other is None else value + (own() * other()).sum() ** 2
            if is_coupled and upper is not None and lower is not None:
                value = value + (own() * upper() * lower()).sum() ** 2
            return value

        step = partial(torch.optim.SGD, lr=1e-3)
        implicit = Implicit(Identity(0.1), curvature=curvature) if number else None
        start = Point(0.1 * torch.randn(3, dtype=torch.float64))
        return Problem(names[number], start, loss, roles=played, optimizer=step, hypergradient=implicit)

    shapes = {upper: [lower] for upper, lower in pairwise(names)}
    reads = {lower: [upper] for upper, lower in pairwise(names)}
    return Schedule(Program([make(number) for number in range(length)], Graph(shapes, reads), trace=trace))


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("curvature", ["total", "partial"])
def test_a_tick_of_a_chain_evaluates_each_loss_once_a_gradient(length: int, curvature: str) -> None:
    """By the plans, `n (n + 1) / 2`: the gradient of a problem passes through all below it, and evaluates the loss of
    each; with partial curvature `2 n - 1`, since a gradient stops at the next."""
    calls: list[str] = []
    schedule = chain(length, curvature, calls)
    schedule.tick()
    calls.clear()
    schedule.tick()
    assert len(calls) == (length * (length + 1) // 2 if curvature == "total" else 2 * length - 1)
    once = {name: calls.count(name) for name in schedule.program.problems}
    assert once == {f"p{n}": n + 1 if curvature == "total" else min(n + 1, 2) for n in range(length)}


class _Counted(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def num_operations(length: int, trace: str | None) -> int:
    schedule, counts = chain(length, "total", trace=trace), []
    for _ in range(5):
        with _Counted() as counted:
            schedule.tick()
        counts.append(counted.count)
    # The most are those of the plans, which a trace is made from and compared with.
    return min(counts)


def test_a_trace_shares_what_the_gradients_of_a_chain_have_in_common() -> None:
    """Each further problem adds as many operations as the one before, where a loss has a term with each neighbour."""
    planned, traced = ([num_operations(length, trace) for length in (2, 3, 4)] for trace in (None, "eager"))
    assert planned[2] - planned[1] > planned[1] - planned[0]
    assert traced[2] - traced[1] == traced[1] - traced[0]


def test_a_traced_chain_is_the_planned_one() -> None:
    planned, traced = (chain(3, "total", is_coupled=True, trace=trace) for trace in (None, "eager"))
    for _ in range(4):
        planned.tick()
        traced.tick()
    torch.testing.assert_close(parameters(traced.program), parameters(planned.program), rtol=1e-12, atol=0.0)
