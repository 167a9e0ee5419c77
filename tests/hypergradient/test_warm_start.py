"""Solves that begin at the last solution."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import (
    ConjugateGradient,
    FixedPoint,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
)
from mlotool.problem.interface import LowerProblem, LowerView, Memory
from tests import programs

HESSIAN = programs.definite(1)
VECTOR = programs.vector(2)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("solver", [ConjugateGradient(20, 1e-12), NormalEquationConjugateGradient(20, 1e-12)])
def test_a_start_at_the_solution_needs_one_product(solver: Any) -> None:
    expected = torch.linalg.solve(HESSIAN, VECTOR)
    result = solver.solve(lambda u: [HESSIAN @ u[0]], [VECTOR], start=[expected])
    assert result.num_products == 1
    assert torch.equal(result.solution[0], expected)
    near = solver.solve(lambda u: [HESSIAN @ u[0]], [VECTOR], start=[expected + 0.1])
    assert error(near.solution[0], expected) < 1e-10
    # One that is worse than zero, or NaN, is no start.
    for start in (expected + 100.0, expected * torch.nan):
        assert error(solver.solve(lambda u: [HESSIAN @ u[0]], [VECTOR], start=[start]).solution[0], expected) < 1e-10


def test_a_fixed_point_goes_on_from_its_start() -> None:
    whole, part = FixedPoint(7, 0.2), FixedPoint(3, 0.2)
    first = part.solve(lambda u: [HESSIAN @ u[0]], [VECTOR])
    second = FixedPoint(4, 0.2).solve(lambda u: [HESSIAN @ u[0]], [VECTOR], start=first.solution)
    expected = whole.solve(lambda u: [HESSIAN @ u[0]], [VECTOR])
    assert torch.equal(second.solution[0], expected.solution[0])
    assert (first.num_products, second.num_products, expected.num_products) == (2, 4, 6)


def test_single_steps_converge_over_pullbacks() -> None:
    """SOBA at a fixed point: each gradient is one step of the linear system nearer."""
    case = programs.bilevel(0.03)
    program = case.program(lambda: Implicit(FixedPoint(1, 0.2), warm_start=True))
    errors = [error(program.gradient("lam")["x"], case.reference()) for _ in range(150)]
    assert errors[0] > 0.1
    assert errors[-1] < 1e-9
    neumann = case.program(lambda: Implicit(Neumann(5, 0.2))).gradient("lam")["x"]
    assert errors[4] == pytest.approx(error(neumann, case.reference()), rel=1e-9)


def test_a_resumed_program_goes_on_at_the_same_start() -> None:
    def make() -> Any:
        return programs.trilevel(0.03).program(lambda: Implicit(FixedPoint(1, 0.2), warm_start=True))

    whole, first, second = make(), make(), make()
    for program in (whole, first):
        for _ in range(3):
            program.gradient("top")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        assert torch.equal(second.gradient("top")["x"], whole.gradient("top")["x"])
    assert not torch.equal(make().gradient("top")["x"], whole.gradient("top")["x"])


def test_the_columns_of_a_resumed_nystrom_are_those_of_the_whole_run() -> None:
    def make() -> Any:
        return programs.bilevel(0.03).program(lambda: Implicit(Nystrom(1, 10.0, seed=3)))

    whole, second = make(), make()
    drawn = [whole.gradient("lam")["x"] for _ in range(6)]
    assert len({tuple(each.tolist()) for each in drawn}) > 1
    first = make()
    for _ in range(3):
        first.gradient("lam")
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second.gradient("lam")["x"], each) for each in drawn[3:])


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
    assert Implicit(FixedPoint()).state_dict(memory.value) == {}


@pytest.mark.parametrize("solver", [ConjugateGradient(50, 1e-13), FixedPoint(70, 0.2, 1e-7)], ids=["cg", "fixed"])
def test_a_differentiated_pullback_begins_at_zero(solver: Any) -> None:
    case = programs.nested(0.02)
    program = case.program(lambda: Implicit(solver, warm_start=True))
    for _ in range(2):
        assert error(program.gradient("top")["x"], case.reference()) < 1e-6
