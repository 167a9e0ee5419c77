"""Every solver with every product on every program, against the solved program and the solvers' own bounds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core import stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import (
    SABA,
    AbstractSolver,
    ConjugateGradient,
    Exact,
    FirstOrder,
    FixedPoint,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
)
from mlotool.program import AbstractHypergradient
from tests import programs
from tests.programs import Case

CUBIC = 0.03
PROGRAMS: dict[str, Callable[[float], Case]] = {
    "quadratic": programs.bilevel,
    "ridge": programs.ridge,
    "logistic": programs.logistic,
    "trilevel": programs.trilevel,
    "two_path": programs.two_path,
    "diamond": programs.diamond,
    "ladder": programs.ladder,
}
# By name, from a step size and a tolerance.
CONVERGED: dict[str, Callable[[float, float], AbstractSolver]] = {
    "exact": lambda step, tolerance: Exact(),
    "cg": lambda step, tolerance: ConjugateGradient(50, tolerance),
    "normal_cg": lambda step, tolerance: NormalEquationConjugateGradient(50, tolerance),
    "fixed_point": lambda step, tolerance: FixedPoint(3000, step, max(tolerance, 1e-10)),
}
TOLERANCE = {"reverse": 1e-12, "forward": 1e-12, "finite_difference": 1e-8}
ACCURACY = {"reverse": 1e-8, "forward": 1e-8, "finite_difference": 1e-5}


@dataclass
class Dense:
    """A solved program without nesting in dense matrices, lower problems in the order of their solution.

    Args:
        hessians: by problem.
        crosses: by problem and what shapes it, `d^2 C_l / dtheta_l dx`.
        slopes: by problem, the partial gradient of the top loss.
        top: name of the top problem.
        gradient: the solved program's.
    """

    hessians: dict[str, Tensor]
    crosses: dict[str, dict[str, Tensor]]
    slopes: dict[str, Tensor]
    top: str
    gradient: Tensor

    @property
    def step_size(self) -> float:
        return 1.0 / max(float(torch.linalg.eigvalsh(each).max()) for each in self.hessians.values())

    def pull(self, inverse: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the cotangents of all problems."""
        total = {name: slope.clone() for name, slope in self.slopes.items()}
        for name, hessian in reversed(self.hessians.items()):
            solution = inverse(hessian) @ total[name]
            for other, cross in self.crosses[name].items():
                total[other] = total[other] - cross.T @ solution
        return total


@cache
def dense(name: str) -> Dense:
    case = PROGRAMS[name](CUBIC)
    solved = case.solve(case.start.clone().requires_grad_())
    values = {case.top: case.start, **{key: value.detach() for key, value in solved.items()}}
    hessians, crosses = {}, {}
    for lower, loss in case.losses.items():
        if lower == case.top:
            continue
        roles = list(loss.__code__.co_varnames[: loss.__code__.co_argcount])
        found = torch.autograd.functional.hessian(loss, tuple(values[role] for role in roles))
        own = roles.index(lower)
        hessians[lower] = found[own][own]
        crosses[lower] = {role: found[own][index] for index, role in enumerate(roles) if index != own}
    slopes = {key: torch.zeros_like(value) for key, value in values.items()}
    top = case.losses[case.top]
    roles = list(top.__code__.co_varnames[: top.__code__.co_argcount])
    slopes.update(
        zip(roles, torch.autograd.functional.jacobian(top, tuple(values[role] for role in roles)), strict=True)
    )
    return Dense(hessians, crosses, slopes, case.top, case.reference())


def gradient(name: str, solver: AbstractSolver, product: str) -> Tensor:
    case = PROGRAMS[name](CUBIC)
    return case.program(lambda: Implicit(solver, product=product)).gradient(case.top)["x"]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_dense_program_is_the_solved_one(name: str) -> None:
    """Two references that share nothing but the losses."""
    model = dense(name)
    assert relative_error(model.pull(torch.linalg.inv)[model.top], model.gradient) < 1e-10
    assert min(float(torch.linalg.eigvalsh(each).min()) for each in model.hessians.values()) > 0.1


def test_the_solved_ridge_regression_is_the_closed_form() -> None:
    inputs, targets, other_inputs, other_targets = programs.regression_data()
    case = programs.ridge()
    penalty = case.start.exp()
    hessian = inputs.T @ inputs / 8 + penalty * torch.eye(3, dtype=torch.float64)
    w = torch.linalg.solve(hessian, inputs.T @ targets / 8)
    slope = other_inputs.T @ (other_inputs @ w - other_targets) / 8
    expected = -penalty * (w @ torch.linalg.solve(hessian, slope))
    assert relative_error(case.reference(), expected) < 1e-10
    found = case.program(lambda: Implicit(ConjugateGradient(20, 1e-13))).gradient("lam")["x"]
    assert relative_error(found, expected) < 1e-8


# Solvers see a product as a function: each solver with one product, and each product with one solver.
@pytest.mark.parametrize(
    ("solver", "product"),
    [*[(solver, "reverse") for solver in CONVERGED], ("cg", "forward"), ("cg", "finite_difference")],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_converged_solvers_equal_the_solved_program(name: str, solver: str, product: str) -> None:
    model = dense(name)
    found = gradient(name, CONVERGED[solver](model.step_size, TOLERANCE[product]), product)
    assert relative_error(found, model.gradient) < ACCURACY[product]


@pytest.mark.parametrize("name", PROGRAMS)
def test_neumann_is_the_dense_series(name: str) -> None:
    model = dense(name)
    series = model.pull(lambda hessian: neumann(hessian, 4, model.step_size))[model.top]
    assert relative_error(gradient(name, Neumann(4, model.step_size), "reverse"), series) < ACCURACY["reverse"]


def neumann(hessian: Tensor, num_terms: int, step: float) -> Tensor:
    factor = torch.eye(len(hessian), dtype=torch.float64) - step * hessian
    return step * sum(torch.linalg.matrix_power(factor, k) for k in range(num_terms))


@pytest.mark.parametrize("shapes_both", [True, False], ids=["shapes-both", "shapes-the-middle"])
@pytest.mark.parametrize("solver", ["exact", "cg", "normal_cg"])
def test_a_nested_program(solver: str, shapes_both: bool) -> None:
    case = programs.nested(CUBIC, shapes_both)
    found = case.program(lambda: Implicit(CONVERGED[solver](0.2, 1e-12))).gradient("top")["x"]
    assert relative_error(found, case.reference()) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("solver", [FixedPoint(1000, 0.2, 1e-10), Neumann(85, 0.2)], ids=["fixed_point", "neumann"])
def test_series_are_differentiated_in_a_nested_program(solver: AbstractSolver) -> None:
    case = programs.nested(CUBIC)
    found = case.program(lambda: Implicit(solver)).gradient("top")["x"]
    assert relative_error(found, case.reference()) < 1e-8


def by_problem(**algorithms: AbstractHypergradient) -> Callable[[], AbstractHypergradient]:
    """Return what gives the problems of a nested case, in their order, these algorithms."""
    waiting = iter([*algorithms.values(), FirstOrder()])
    return lambda: next(waiting)


@pytest.mark.slow
@pytest.mark.parametrize("shapes_both", [True, False], ids=["shapes-both", "shapes-the-middle"])
@pytest.mark.parametrize(
    ("low", "mid"),
    [
        ("reverse", "finite_difference"),
        ("finite_difference", "finite_difference"),
        ("forward", "finite_difference"),
        ("reverse", "forward"),
        ("forward", "forward"),
        ("forward", "reverse"),
    ],
)
def test_products_in_a_nested_program(low: str, mid: str, shapes_both: bool) -> None:
    """The lower solution follows the parameters that move."""
    case = programs.nested(CUBIC, shapes_both)
    make = CONVERGED["cg"]
    make_both = by_problem(
        low=Implicit(make(0.2, TOLERANCE[mid]), product=low), mid=Implicit(make(0.2, TOLERANCE[mid]), product=mid)
    )
    found = case.program(make_both).gradient("top")["x"]
    assert relative_error(found, case.reference()) < max(ACCURACY[low], ACCURACY[mid])


@pytest.mark.parametrize("product", ["forward", "finite_difference"])
def test_products_above_a_nested_program(product: str) -> None:
    """Two solutions follow, one inside the other."""
    case = programs.doubly_nested(CUBIC)
    exact = Implicit(Exact())
    high = Implicit(Exact(), product=product)
    found = case.program(by_problem(low=exact, mid=exact, high=high)).gradient("top")["x"]
    assert relative_error(found, case.reference()) < ACCURACY[product]


def test_products_with_random_numbers_and_constants_in_a_nested_program() -> None:
    """All evaluations of one pullback draw the same numbers, and take the same values behind stop_gradient."""

    def noisy(loss: Callable[..., Tensor], amount: float) -> Callable[..., Tensor]:
        def with_noise(batch: None, **roles: Any) -> Tensor:
            values = {name: role() for name, role in roles.items()}
            first = next(iter(values.values()))
            noise = 1 + amount * torch.rand(3, dtype=torch.float64)
            return loss(**values) + 0.05 * (stop_gradient(first**2) * (noise * first - 1) ** 2).sum()

        return with_noise

    case = programs.nested(CUBIC)
    found = []
    for product in ("reverse", "forward", "finite_difference"):
        program = case.program(by_problem(low=Implicit(Exact()), mid=Implicit(Exact(), product=product)))
        # Reverse products draw for the lower problem once, finite differences also for the way that it moves.
        for name, amount in (("low", 0.0), ("mid", 1.0)):
            program.problems[name].loss = noisy(case.losses[name], amount)
        program.random.manual_seed(0)
        found.append(program.gradient("top")["x"])
    assert relative_error(found[1], found[0]) < ACCURACY["forward"]
    assert relative_error(found[2], found[0]) < ACCURACY["finite_difference"]
    assert relative_error(found[0], case.reference()) > 1e-3


def test_finite_differences_of_a_differentiated_pullback_are_refused() -> None:
    exact, differences = Implicit(Exact()), Implicit(Exact(), product="finite_difference")
    match = r"problems\.{}\.hypergradient\.product: found product: finite_difference.*expected reverse"
    with pytest.raises(ConfigError, match=match.format("low")):
        programs.nested().program(by_problem(low=differences, mid=exact))
    for high in (exact, differences):
        with pytest.raises(ConfigError, match=match.format("mid")):
            programs.doubly_nested().program(by_problem(low=exact, mid=differences, high=high))


def test_finite_differences_where_the_lower_solution_does_not_follow_are_refused() -> None:
    differences = Implicit(Exact(), product="finite_difference")
    match = r"problems\.mid\.hypergradient\.product: found .finite_difference.*SABA does not tell how the solution"
    with pytest.raises(ConfigError, match=match):
        programs.nested().program(by_problem(low=SABA(step_size=0.1), mid=differences))


def test_the_middle_problem_of_a_nested_program_is_at_a_stationary_point_of_its_total_gradient() -> None:
    program = programs.nested(0.05).program(lambda: Implicit(Exact()))
    assert float(program.gradient("mid")["x"].norm()) < 1e-9


def test_partial_curvature_differs_on_nested_programs_and_only_there() -> None:
    errors = {}
    for name in ("quadratic", "trilevel", "two_path", "diamond", "nested"):
        case = (PROGRAMS | {"nested": programs.nested})[name](0.0)
        program = case.program(lambda: Implicit(Exact(), curvature="partial"))
        errors[name] = relative_error(program.gradient(case.top)["x"], case.reference())
    assert errors.pop("nested") > 0.05
    assert max(errors.values()) < 1e-9


def test_the_solution_is_differentiable_in_code_of_the_users_own() -> None:
    case = programs.bilevel(0.05)
    program = case.program(lambda: Implicit(Exact()))
    upper = program.problems["lam"].theta["x"]
    loss = case.losses["lam"](upper, program.solution("w")["x"])
    (found,) = torch.autograd.grad(loss, upper)
    assert relative_error(found, case.reference()) < 1e-9
