"""Every solver with every product against the solved program, and comparisons with the most exact one."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Exact, FirstOrder, FixedPoint, Identity, Implicit, Neumann, Nystrom, Unrolled, stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import SABA, AbstractSolver, ConjugateGradient, NormalEquationConjugateGradient, implicit
from mlotool.hypergradient.compare import compare, solved_slope
from mlotool.program import AbstractHypergradient, Program
from tests import programs
from tests.hypergradient import every_algorithm
from tests.hypergradient.two_levels import ticked, two_levels
from tests.program.small import assert_identical, numbers, pair, parameters
from tests.programs import Case, Point

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
# By name, from a tolerance.
CONVERGED: dict[str, Callable[[float], AbstractSolver]] = {
    "exact": lambda tolerance: Exact(),
    "cg": lambda tolerance: ConjugateGradient(50, tolerance),
    "normal_cg": lambda tolerance: NormalEquationConjugateGradient(50, tolerance),
    "fixed_point": lambda tolerance: FixedPoint(3000, 0.2, max(tolerance, 1e-10)),
}
TOLERANCE = {"reverse": 1e-12, "forward": 1e-12, "finite_difference": 1e-8}
ACCURACY = {"reverse": 1e-8, "forward": 1e-8, "finite_difference": 1e-5}


@cache
def case_of(name: str) -> Case:
    return PROGRAMS[name](CUBIC)


@cache
def nested(shapes_both: bool = True) -> Case:
    return programs.nested(CUBIC, shapes_both)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


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
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("solver", "product"),
    [*[(solver, "reverse") for solver in CONVERGED], ("cg", "forward"), ("cg", "finite_difference")],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_converged_solvers_equal_the_solved_program(name: str, solver: str, product: str) -> None:
    case = case_of(name)
    found = case.program(lambda: Implicit(CONVERGED[solver](TOLERANCE[product]), product)).gradient(case.top)["x"]
    assert relative_error(found, case.reference()) < ACCURACY[product]


@pytest.mark.parametrize(("solver", "shapes_both"), [("exact", True), ("cg", True), ("normal_cg", True), ("cg", False)])
def test_a_nested_program(solver: str, shapes_both: bool) -> None:
    case = nested(shapes_both)
    found = case.program(lambda: Implicit(CONVERGED[solver](1e-12))).gradient("top")["x"]
    assert relative_error(found, case.reference()) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("solver", [FixedPoint(1000, 0.2, 1e-10), Neumann(85, 0.2)], ids=["fixed_point", "neumann"])
def test_series_are_differentiated_in_a_nested_program(solver: AbstractSolver) -> None:
    case = nested()
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
    case = nested(shapes_both)
    solver = CONVERGED["cg"](TOLERANCE[mid])
    found = case.program(by_problem(low=Implicit(solver, low), mid=Implicit(solver, mid))).gradient("top")["x"]
    assert relative_error(found, case.reference()) < max(ACCURACY[low], ACCURACY[mid])


def test_products_above_a_nested_program() -> None:
    """Two solutions follow, one inside the other."""
    case, exact = programs.doubly_nested(CUBIC), Implicit(Exact())
    expected = case.reference()
    for product in ("forward", "finite_difference"):
        high = Implicit(Exact(), product=product)
        found = case.program(by_problem(low=exact, mid=exact, high=high)).gradient("top")["x"]
        assert relative_error(found, expected) < ACCURACY[product]


def test_products_with_random_numbers_and_constants_in_a_nested_program() -> None:
    """All evaluations of one pullback draw the same numbers, and take the same values behind stop_gradient."""

    def noisy(loss: Callable[..., Tensor], amount: float) -> Callable[..., Tensor]:
        def with_noise(batch: None, **roles: Any) -> Tensor:
            values = {name: role() for name, role in roles.items()}
            first = next(iter(values.values()))
            noise = 1 + amount * torch.rand(3, dtype=torch.float64)
            return loss(**values) + 0.05 * (stop_gradient(first**2) * (noise * first - 1) ** 2).sum()

        return with_noise

    case, found = nested(), []
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
    match = (
        r"problems\.{}\.hypergradient\.product: found hypergradient\.product: finite_difference with .*expected reverse"
    )
    with pytest.raises(ConfigError, match=match.format("low")):
        nested().program(by_problem(low=differences, mid=exact))
    deeper = programs.doubly_nested()
    for high in (exact, differences):
        with pytest.raises(ConfigError, match=match.format("mid")):
            deeper.program(by_problem(low=exact, mid=differences, high=high))


def test_finite_differences_where_the_lower_solution_does_not_follow_are_refused() -> None:
    differences = Implicit(Exact(), product="finite_difference")
    match = r"problems\.mid\.hypergradient\.product: found .finite_difference.*SABA does not compute"
    with pytest.raises(ConfigError, match=match):
        nested().program(by_problem(low=SABA(step_size=0.1), mid=differences))


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


MATRIX = torch.tensor([[3.0, 1.0], [1.0, 0.5]], dtype=torch.float64)


def quadratic(hypergradient: AbstractHypergradient, start: Tensor | None = None, matrix: Tensor = MATRIX) -> Program:
    """Return `w = argmin 1/2 w A w - w u`, `C = 1/2 norm(w - 1)^2`: dC/du = A^-1 (A^-1 u - 1)."""

    def low(batch: Any, *, w: Any, u: Any) -> Tensor:
        return 0.5 * w() @ matrix @ w() - w() @ u()

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
    ticked(program, 3)
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
    assert "found None; expected one of torch.optim.Adam" in row.note


def test_an_indefinite_problem_has_no_reference() -> None:
    program = quadratic(Implicit(Identity()), numbers(0.1, 0.2), torch.diag(numbers(1.0, 0.0)))
    with pytest.warns(UserWarning, match="a matrix that is singular") as caught:
        first, *_ = rows = [*compare(program, "u", {}, {"cg": lambda: Implicit(ConjugateGradient())})]
    assert not first.has_converged
    # Only of the reference: the others' ends are in their notes, since a warning has no row.
    assert not [each for each in caught if "ConjugateGradient" in str(each.message)]
    assert "singular" in rows[-1].note


def test_what_is_not_solved_says_why() -> None:
    assert "2 parameters; only problems of up to 1" in solved_slope(quadratic(Implicit(Exact())), "u", {}, 1).note


CASE = programs.bilevel(0.03)


def statistics(algorithm: Implicit, num_pullbacks: int = 1) -> dict[str, float]:
    program = CASE.program(lambda: algorithm)
    for _ in range(num_pullbacks):
        program.gradient("lam")
    return program.statistics()


def dense_response() -> tuple[Tensor, Tensor, Tensor]:
    """Return H, M and v of the lower problem."""
    solved = CASE.values["w"].detach()
    blocks = torch.autograd.functional.hessian(CASE.losses["w"], (solved, CASE.start))
    slope = torch.autograd.functional.jacobian(lambda w: CASE.losses["lam"](CASE.start, w), solved)
    return blocks[0][0], blocks[0][1], slope


def test_neumann_is_the_dense_series() -> None:
    hessian, cross, slope = dense_response()
    factor = torch.eye(3, dtype=torch.float64) - 0.2 * hessian
    series = 0.2 * sum(torch.linalg.matrix_power(factor, k) for k in range(4))
    found = CASE.program(lambda: Implicit(Neumann(4, 0.2))).gradient("lam")["x"]
    assert relative_error(found, 0.2 * CASE.start - cross.T @ series @ slope) < 1e-12


@pytest.mark.parametrize("product", ["reverse", "finite_difference"])
def test_a_report_is_the_dense_one(product: Any) -> None:
    hessian, cross, slope = dense_response()
    found = statistics(Implicit(Identity(0.3), product, report_every=1))
    expected = (0.3 * hessian @ slope - slope).norm() / slope.norm()
    assert found["w/solver_residual"] == pytest.approx(float(expected), rel=1e-9)
    cosine = torch.cosine_similarity(cross.T @ slope, cross.T @ torch.linalg.solve(hessian, slope), dim=0)
    assert found["w/solver_cosine"] == pytest.approx(float(cosine), rel=1e-7)


def test_the_residual_is_that_of_the_undamped_system() -> None:
    hessian, _, slope = dense_response()
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
    assert found == algorithm.statistics(resumed.internals.algorithm_state("w")) != {}


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
