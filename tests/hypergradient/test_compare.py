"""The comparison of hypergradients says what is true on programs whose answer is known."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import ConjugateGradient, Exact, FirstOrder, Identity, Implicit, Unrolled
from mlotool.hypergradient.compare import compare, solved_slope
from mlotool.program import AbstractHypergradient, Program, Schedule
from tests.hypergradient import every_algorithm
from tests.hypergradient.two_levels import two_levels
from tests.program.small import assert_identical, numbers, pair, parameters
from tests.programs import Point

MATRIX = torch.tensor([[3.0, 1.0], [1.0, 0.5]], dtype=torch.float64)


def quadratic(hypergradient: AbstractHypergradient, start: Tensor | None = None) -> Program:
    """Return `w = argmin 1/2 w A w - w u`, `C = 1/2 norm(w - 1)^2`: dC/du = A^-1 (A^-1 u - 1)."""

    def low(batch: Any, *, w: Any, u: Any) -> Tensor:
        return 0.5 * w() @ MATRIX @ w() - w() @ u()

    def up(batch: Any, *, w: Any) -> Tensor:
        return 0.5 * (w() - 1).square().sum()

    u = numbers(0.4, -0.7)
    w = Point(torch.linalg.solve(MATRIX, u) if start is None else start)
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1), "unroll_steps": 3}
    return two_levels((w, low), (Point(u), up), hypergradient, **settings)


def test_the_table_of_a_quadratic() -> None:
    program = quadratic(Implicit(Identity()))
    inverse = torch.linalg.inv(MATRIX)
    exact = inverse @ (inverse @ numbers(0.4, -0.7) - 1)
    own = inverse @ numbers(0.4, -0.7) - 1
    options = {"cg": lambda: Implicit(ConjugateGradient(5, 1e-12)), "first_order": FirstOrder, "sgd": Unrolled}
    before = parameters(program)
    first, recipe, *others = compare(program, "u", {}, options)
    assert_identical(parameters(program), before)
    assert first.norm == pytest.approx(float(exact.norm()))
    assert (first.cosine, first.error, first.has_converged) == (1.0, 0.0, True)
    assert recipe.cosine == pytest.approx(float(own @ exact / own.norm() / exact.norm()))
    assert recipe.error == pytest.approx(float((own - exact).norm() / exact.norm()))
    named = {each.name: each for each in others}
    assert named["cg"].cosine == pytest.approx(1.0)
    assert named["cg"].error == pytest.approx(0.0, abs=1e-9)
    assert (named["first_order"].norm, named["first_order"].error) == (0.0, 1.0)
    assert named["sgd"].cosine is not None


def test_the_slope_of_a_solved_program() -> None:
    program = quadratic(Implicit(Identity()), start=numbers(5.0, -3.0))
    before = parameters(program)
    slope = solved_slope(program, "u", {})
    assert_identical(parameters(program), before)
    inverse = torch.linalg.inv(MATRIX)
    own = inverse @ numbers(0.4, -0.7) - 1
    exact = inverse @ own
    assert slope.stationarity is not None
    assert slope.stationarity < 1e-8
    assert slope.exact == pytest.approx(float(exact.norm()), rel=1e-6)
    assert slope.difference == pytest.approx(slope.exact, rel=1e-6)
    assert slope.own == pytest.approx(float(own @ exact / exact.norm()), rel=1e-6)


def test_a_nonlinear_program_with_batches() -> None:
    program = pair({"hypergradient": Implicit(ConjugateGradient(20, 1e-12))})
    batches = {name: problem.stream.next() for name, problem in program.problems.items()}
    slope = solved_slope(program, "u", batches)
    assert slope.difference == pytest.approx(slope.exact, rel=1e-5)
    assert slope.own == pytest.approx(slope.exact, rel=1e-8)


def test_the_slope_of_an_unrolled_program() -> None:
    program = quadratic(Unrolled(horizon=1), start=numbers(0.3, -0.1))
    before = parameters(program)
    slope = solved_slope(program, "u", {})
    assert_identical(parameters(program), before)
    assert slope.difference == pytest.approx(slope.exact, rel=1e-6)
    assert slope.own is not None
    assert slope.exact is not None
    assert slope.own < 0.7 * slope.exact


def test_an_unrolled_recipe_is_compared_with_what_takes_one_batch() -> None:
    """`mlotool check mwn hypergradient=unrolled` gave the list of the unrolled steps' batches to a loss."""
    program = every_algorithm.program(Unrolled)
    for _ in range(3):
        Schedule(program).tick()
    lower, upper = program.problems["model"].stream, program.problems["weigher"].stream
    assert lower is not None
    assert upper is not None
    batches = {"model": [lower.last()] * 2, "weigher": upper.last()}
    *_, row = compare(program, "weigher", batches, {"fd": lambda: Implicit(Identity(), "finite_difference")})
    assert row.note == ""
    assert row.cosine is not None


def test_what_is_refused_is_a_row_with_the_reason() -> None:
    def low(batch: Any, *, w: Any, u: Any) -> Tensor:
        return 0.5 * (w() - u()).square().sum()

    top = Point(numbers(0.3)), lambda batch, *, w: w().square().sum()
    program = two_levels((Point(numbers(0.1)), low), top, Implicit(Exact()))
    *_, row = compare(program, "u", {}, {"unrolled": Unrolled})
    assert row.norm is None
    assert "found nothing; expected one of torch.optim.SGD" in row.note


def test_an_indefinite_problem_has_no_reference() -> None:
    singular = torch.diag(numbers(1.0, 0.0))

    def low(batch: Any, *, w: Any, u: Any) -> Tensor:
        return 0.5 * w() @ singular @ w() - w() @ u()

    top = Point(numbers(0.3, 0.4)), lambda batch, *, w: w().square().sum()
    program = two_levels((Point(numbers(0.1, 0.2)), low), top, Implicit(Identity()))
    with pytest.warns(UserWarning, match="a matrix that is singular") as caught:
        first, *_ = rows = [*compare(program, "u", {}, {"cg": lambda: Implicit(ConjugateGradient())})]
    assert not first.has_converged
    # Only of the reference: the others' ends are in their notes, since a warning has no row.
    assert not [each for each in caught if "ConjugateGradient" in str(each.message)]
    assert "singular" in rows[-1].note


def test_what_is_not_solved_says_why() -> None:
    assert "2 parameters; it is solved up to 1" in solved_slope(quadratic(Implicit(Exact())), "u", {}, 1).note
