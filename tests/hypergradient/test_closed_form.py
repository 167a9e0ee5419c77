"""The total gradient against a plain autograd program that solves every level."""

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import ConjugateGradient, Exact, Identity, Implicit, Neumann
from tests import programs

CASES = {
    "bilevel": programs.bilevel,
    "trilevel": programs.trilevel,
    "two_path": programs.two_path,
    "diamond": programs.diamond,
    "nested": programs.nested,
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("cubic", [0.0, 0.05])
@pytest.mark.parametrize("name", CASES)
def test_the_solved_program(name, cubic):
    case = CASES[name](cubic)
    for solver, product, tolerance in (
        (Exact(), "reverse", 1e-9),
        (ConjugateGradient(50, 1e-13), "reverse", 1e-9),
        (Exact(), "finite_difference", 1e-5),
    ):
        if name != "nested" or product == "reverse":
            program = case.program(lambda s=solver, p=product: Implicit(s, product=p))
            assert relative_error(program.gradient(case.top)["x"], case.reference()) < tolerance


@pytest.mark.parametrize("cubic", [0.0, 0.05])
def test_a_nested_program_inside_a_nested_program(cubic):
    case = programs.doubly_nested(cubic)
    program = case.program(lambda: Implicit(Exact()))
    assert relative_error(program.gradient("top")["x"], case.reference()) < 1e-9


def test_the_middle_problem_of_a_nested_program_is_at_a_stationary_point_of_its_total_gradient():
    program = programs.nested(0.05).program(lambda: Implicit(Exact()))
    assert float(program.gradient("mid")["x"].norm()) < 1e-9


def test_partial_curvature_differs_on_nested_programs_and_only_there():
    errors = {}
    for name in CASES:
        case = CASES[name]()
        program = case.program(lambda: Implicit(Exact(), curvature="partial"))
        errors[name] = relative_error(program.gradient(case.top)["x"], case.reference())
    assert errors.pop("nested") > 0.05
    assert max(errors.values()) < 1e-9


def test_the_solution_is_differentiable_in_code_of_the_users_own():
    case = programs.bilevel(0.05)
    program = case.program(lambda: Implicit(Exact()))
    upper = program.problems["lam"].theta["x"]
    loss = case.losses["lam"](upper, program.solution("w")["x"])
    (found,) = torch.autograd.grad(loss, upper)
    assert relative_error(found, case.reference()) < 1e-9


def test_neumann_differentiates_through_its_series_in_a_nested_program():
    """Many terms agree with the exact solver, so the derivative of the series is the series' own."""
    case = programs.nested(0.02)
    found = case.program(lambda: Implicit(Neumann(60, 0.2))).gradient("top")["x"]
    assert relative_error(found, case.reference()) < 1e-6


def test_identity_is_the_first_term_of_neumann():
    case = programs.trilevel(0.05)
    one = case.program(lambda: Implicit(Identity(0.3))).gradient("top")["x"]
    other = case.program(lambda: Implicit(Neumann(1, 0.3))).gradient("top")["x"]
    assert torch.equal(one, other)
