"""SOBA and SABA against a plain loop in the order that their docstrings state."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from mlotool import SABA, Schedule
from mlotool.hypergradient import ConjugateGradient, FixedPoint, Implicit, Neumann
from mlotool.problem.interface import LowerProblem, LowerView, Memory
from tests import programs
from tests.hypergradient.two_levels import two_levels
from tests.program.small import numbers

A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
TARGET = torch.tensor([0.3, -0.7], dtype=torch.float64)
RATE, STEP, UPPER_RATE = 0.2, 0.3, 0.1


def lower(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * theta @ A @ theta - theta @ x + 0.1 * (theta**4).sum() + 0.05 * (x**2 * theta**2).sum()


def upper(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * ((theta - TARGET) ** 2).sum() + 0.01 * (x**2).sum()


def by_hand(num_steps: int) -> tuple[Tensor, Tensor]:
    """Return theta and x of algorithm 1 of Dagreou et al. 2022 on full batches, in the order of a tick."""
    theta, x = numbers(0.5, 0.5), numbers(1.0, -1.0)
    q = torch.zeros_like(theta)
    for _ in range(num_steps):
        theta = theta - RATE * torch.autograd.functional.jacobian(lower, (theta, x))[0]
        (hessian, _), (cross, _) = torch.autograd.functional.hessian(lower, (theta, x))
        slope, direct = torch.autograd.functional.jacobian(upper, (theta, x))
        q = q - STEP * (hessian @ q - slope)
        x = x - UPPER_RATE * (direct - cross @ q)
    return theta, x


ALGORITHMS = {"soba": lambda: Implicit(FixedPoint(1, STEP), warm_start=True), "saba": lambda: SABA(STEP)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_iterates_are_those_of_the_stated_order(name: str) -> None:
    low = programs.Point(numbers(0.5, 0.5)), lambda batch, *, w, u: lower(w(), u())
    high = programs.Point(numbers(1.0, -1.0)), lambda batch, *, w, u: upper(w(), u())
    sgd = {"of_upper": {"optimizer": partial(SGD, lr=UPPER_RATE)}, "optimizer": partial(SGD, lr=RATE)}
    made = two_levels(low, high, ALGORITHMS[name](), **sgd)
    schedule = Schedule(made)
    for number in range(1, 9):
        schedule.tick()
        theta, x = by_hand(number)
        assert float((made.problems["w"].theta["x"].detach() - theta).abs().max()) < 1e-10
        assert float((made.problems["u"].theta["x"].detach() - x).abs().max()) < 1e-10


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_single_steps_converge_over_pullbacks() -> None:
    """SOBA at a fixed point: each gradient is one step of the linear system nearer."""
    case = programs.bilevel(0.03)
    program = case.program(lambda: Implicit(FixedPoint(1, 0.2), warm_start=True))
    errors = [error(program.gradient("lam")["x"], case.reference()) for _ in range(120)]
    assert errors[0] > 0.1
    assert errors[-1] < 1e-8
    neumann = case.program(lambda: Implicit(Neumann(5, 0.2))).gradient("lam")["x"]
    assert errors[4] == pytest.approx(error(neumann, case.reference()), rel=1e-9)


def test_a_start_of_other_shapes_or_another_reader_is_dropped() -> None:
    """And a solution that is not finite is kept for nobody."""

    def pulled(reader: str, size: int, factor: float = 1.0) -> Tensor:
        problem, theta = LowerProblem("w", reader, memory=memory), (torch.full((size,), 2.0, dtype=torch.float64),)
        view = LowerView(problem, theta, lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum())
        cotangent = [torch.full((size,), factor, dtype=torch.float64)]
        return algorithm.pullback(view, [theta[0]]).first_order(theta, [theta[0]], [True], cotangent)[0]

    algorithm = Implicit(FixedPoint(1, 0.2), warm_start=True)
    memory = Memory(algorithm.initial_state())
    # From zero q = 0.2 v; from there 0.2 + 0.2 (1 - 2 * 0.2), and the cotangent is 2 q.
    for reader, size, expected in (("u", 3, 0.4), ("u", 3, 0.64), ("v", 3, 0.4), ("u", 4, 0.4)):
        torch.testing.assert_close(pulled(reader, size), torch.full((size,), expected, dtype=torch.float64))
    with pytest.warns(UserWarning, match="not finite"):
        assert bool(pulled("v", 3, math.nan).isnan().all())
    torch.testing.assert_close(pulled("v", 3), torch.full((3,), 0.64, dtype=torch.float64))


def test_a_differentiated_pullback_begins_at_zero() -> None:
    case = programs.nested(0.02)
    for solver, bound in ((ConjugateGradient(50, 1e-13), 1e-6), (FixedPoint(40, 0.2, 1e-3), 0.02)):
        program = case.program(lambda solver=solver: Implicit(solver, warm_start=True))
        for _ in range(2):
            assert error(program.gradient("top")["x"], case.reference()) < bound
