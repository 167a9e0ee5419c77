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
SOLVERS = {"exact": Exact, "cg": lambda: ConjugateGradient(max_iterations=50, tolerance=1e-14)}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("cubic", [0.0, 0.05], ids=["quadratic", "third-derivatives"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", CASES)
def test_reverse_products_equal_the_solved_program(name, solver, cubic):
    case = CASES[name](cubic)
    program = case.program(lambda: Implicit(SOLVERS[solver]()))
    assert relative_error(program.gradient(case.top)["x"], case.reference()) < 1e-9


@pytest.mark.parametrize("name", ["bilevel", "trilevel", "two_path", "diamond"])
def test_finite_difference_products(name):
    case = CASES[name](0.05)
    program = case.program(lambda: Implicit(Exact(), product="finite_difference"))
    assert relative_error(program.gradient(case.top)["x"], case.reference()) < 1e-5


@pytest.mark.parametrize("cubic", [0.0, 0.05])
def test_nested_where_the_top_shapes_the_middle_problem_alone(cubic):
    case = programs.nested(cubic, shapes_both=False)
    program = case.program(lambda: Implicit(Exact()))
    assert relative_error(program.gradient("top")["x"], case.reference()) < 1e-9


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


def test_neumann_stays_within_its_bound():
    case = programs.bilevel()
    hessian = programs.definite(1)
    step = float(1.0 / torch.linalg.eigvalsh(hessian).max())
    contraction = torch.linalg.matrix_norm(torch.eye(3, dtype=torch.float64) - step * hessian, 2)
    for num_terms in (1, 5, 20):
        program = case.program(lambda n=num_terms: Implicit(Neumann(n, step)))
        found = program.gradient("lam")["x"]
        exact = case.program(lambda: Implicit(Exact())).gradient("lam")["x"]
        # |M^T (I - aH)^K H^-1 v| with M = -H m and v = H (w - t).
        program_w = case.program(lambda: Implicit(Exact())).problems["w"].theta["x"].detach()
        bound = (
            contraction**num_terms * (programs.matrix(2).T @ hessian).norm() * (program_w - programs.vector(3)).norm()
        )
        assert float((found - exact).norm()) <= float(bound) * (1 + 1e-9)


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


def test_the_solution_is_differentiable_in_code_of_the_users_own():
    case = programs.bilevel(0.05)
    program = case.program(lambda: Implicit(Exact()))
    upper = program.problems["lam"].theta["x"]
    loss = case.losses["lam"](upper, program.solution("w")["x"])
    (found,) = torch.autograd.grad(loss, upper)
    assert relative_error(found, case.reference()) < 1e-9
