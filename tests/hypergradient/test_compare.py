"""The comparison of hypergradients says what is true on programs whose answer is known."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.hypergradient import (
    ConjugateGradient,
    Exact,
    FirstOrder,
    Identity,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
    Unrolled,
    implicit,
)
from mlotool.hypergradient.compare import compare, solved_slope
from mlotool.program import AbstractHypergradient, Program, Schedule
from tests import programs
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


CASE = programs.bilevel(0.03)


def statistics(algorithm: Implicit, num_pullbacks: int = 1) -> dict[str, float]:
    program = CASE.program(lambda: algorithm)
    for _ in range(num_pullbacks):
        program.gradient("lam")
    return program.statistics()


def dense() -> tuple[Tensor, Tensor, Tensor]:
    """Return H, M and v of the lower problem."""
    solved = CASE.solve(CASE.start.clone().requires_grad_())["w"].detach()
    blocks = torch.autograd.functional.hessian(CASE.losses["w"], (solved, CASE.start))
    slope = torch.autograd.functional.jacobian(lambda w: CASE.losses["lam"](CASE.start, w), solved)
    return blocks[0][0], blocks[0][1], slope


@pytest.mark.parametrize("product", ["reverse", "finite_difference"])
def test_a_report_is_the_dense_one(product: Any) -> None:
    hessian, cross, slope = dense()
    found = statistics(Implicit(Identity(0.3), product, report_every=1))
    expected = (0.3 * hessian @ slope - slope).norm() / slope.norm()
    assert found["w/solver_residual"] == pytest.approx(float(expected), rel=1e-9)
    cosine = torch.cosine_similarity(cross.T @ slope, cross.T @ torch.linalg.solve(hessian, slope), dim=0)
    assert found["w/solver_cosine"] == pytest.approx(float(cosine), rel=1e-7)


def test_the_residual_is_that_of_the_undamped_system() -> None:
    hessian, _, slope = dense()
    found = statistics(Implicit(Exact(damping=0.5), report_every=1))
    solution = torch.linalg.solve(hessian + 0.5 * torch.eye(3, dtype=torch.float64), slope)
    assert found["w/solver_residual"] == pytest.approx(float((hessian @ solution - slope).norm() / slope.norm()))
    exact = statistics(Implicit(Exact(), report_every=1))
    assert exact["w/solver_residual"] < 1e-13
    assert exact["w/solver_cosine"] == pytest.approx(1.0, abs=1e-12)


def test_only_every_nth_pullback_is_compared() -> None:
    assert "w/solver_cosine" not in statistics(Implicit(Identity(), report_every=3), 2)
    assert "w/solver_cosine" in statistics(Implicit(Identity(), report_every=3), 3)
    assert statistics(Implicit(Identity()), 3) == {}
    algorithm = Implicit(Identity(), report_every=3)
    resumed = CASE.program(lambda: algorithm)
    state = resumed.state_dict()
    resumed.load_state_dict({**state, "w": {**state["w"], "hypergradient": {"num_pullbacks": 2}}})
    resumed.gradient("lam")
    assert "w/solver_cosine" in resumed.statistics()
    saved = resumed.state_dict()["w"]["hypergradient"]
    assert saved["num_pullbacks"] == 3
    found = algorithm.statistics(algorithm.load_state(saved))
    assert found == algorithm.statistics(resumed.algorithm_state("w")) != {}


@pytest.mark.parametrize("is_indefinite", [False, True])
def test_beyond_the_dense_solve_the_reference_is_iterative(monkeypatch: Any, is_indefinite: bool) -> None:
    shift = 2.0 if is_indefinite else 0.0
    hessian = programs.definite(5, 6) - shift * torch.eye(6, dtype=torch.float64)
    assert (float(torch.linalg.eigvalsh(hessian).min()) < 0) is is_indefinite

    def low(batch: Any, *, w: Any, u: Any) -> Tensor:
        return 0.5 * w() @ hessian @ w() - w() @ u() - (w() * u()).sum() ** 2

    upper = programs.Point(0.1 * programs.vector(2, 6)), lambda batch, *, w: (w() ** 3).sum()
    lower = programs.Point(programs.vector(1, 6)), low
    program = two_levels(lower, upper, Implicit(Neumann(3, 0.1), report_every=1))
    program.gradient("u")
    expected = program.statistics()
    monkeypatch.setattr(implicit, "MAX_DENSE_PARAMETERS", 0)
    program.gradient("u")
    assert program.statistics() == pytest.approx(expected, rel=1e-6)
    assert abs(expected["w/solver_cosine"]) < 0.999


ALGORITHMS = {
    "finite_difference": lambda n: Implicit(Identity(), "finite_difference", report_every=n),
    "neumann": lambda n: Implicit(Neumann(3, 0.1), report_every=n),
    "cg": lambda n: Implicit(ConjugateGradient(3, damping=1.0), report_every=n),
    "cg by differences": lambda n: Implicit(ConjugateGradient(3, damping=1.0), "finite_difference", report_every=n),
    "normal_cg": lambda n: Implicit(NormalEquationConjugateGradient(3), report_every=n, warm_start=True),
    "nystrom": lambda n: Implicit(Nystrom(3, 1.0), report_every=n),
}


def dropped_out(algorithm: Implicit) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Softplus(), nn.Linear(4, 1)).double()
    batch = programs.matrix(3)

    def fit(_: Any, *, w: Any, u: Any) -> Tensor:
        return ((w(batch).squeeze(-1) - u()) ** 2).mean() + 0.5 * sum((each**2).sum() for each in w.parameters())

    upper = programs.Point(programs.vector(1)), lambda _, *, w: (w(batch) ** 2).sum()
    return two_levels((net, fit), upper, algorithm)


@pytest.mark.filterwarnings("ignore:The Nystrom solve")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_report_changes_no_result_and_no_random_state(name: str) -> None:
    silent, reporting = (dropped_out(ALGORITHMS[name](n)) for n in (0, 2))
    for number in range(4):
        found = []
        for program in (silent, reporting):
            program.random.manual_seed(number)
            found.append((program.gradient("u")["x"], program.random.state_dict()["cpu"]))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert not bool(torch.equal(found[0][1], torch.Generator().manual_seed(number).get_state()))
    assert reporting.statistics()["w/solver_residual"] > 0
    assert -1 <= reporting.statistics()["w/solver_cosine"] <= 1 + 1e-12
