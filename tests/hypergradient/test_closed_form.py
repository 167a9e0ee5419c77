"""The total gradient against a plain autograd program that solves every level."""

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import Exact, Implicit
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
