"""Systems that are solved side by side equal separate solves, none disturbs another, and NaN stays NaN."""

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import SABA, ConjugateGradient, EvolutionStrategies, Exact, FixedPoint, Identity, Implicit, Unrolled
from mlotool.hypergradient import Neumann, NormalEquationConjugateGradient, Nystrom, Penalty
from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status
from mlotool.hypergradient.vector import flatten, unflatten
from mlotool.problem.interface import LowerProblem, LowerView, Vector
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from tests import programs
from tests.hypergradient import every_algorithm
from tests.hypergradient.test_solvers import SHAPES, SIZE, rand, with_spectrum
from tests.hypergradient.two_levels import two_levels
from tests.problem import test_tasks as maml
from tests.program.small import numbers
from tests.programs import Point

SOLVERS: dict[str, Callable[[], AbstractSolver]] = {
    "identity": lambda: Identity(0.3),
    "neumann": lambda: Neumann(6, 0.2),
    "long neumann": lambda: Neumann(300, 0.4),
    "fixed_point": lambda: FixedPoint(6, 0.2),
    "converged fixed_point": lambda: FixedPoint(500, 0.2, 1e-5),
    "cg": lambda: ConjugateGradient(4, 1e-10),
    "converged cg": lambda: ConjugateGradient(50, 1e-10),
    "damped cg": lambda: ConjugateGradient(50, 1e-10, 0.7),
    "normal_cg": lambda: NormalEquationConjugateGradient(3, 1e-10),
    "converged normal_cg": lambda: NormalEquationConjugateGradient(60, 1e-9),
    "exact": Exact,
    "damped exact": lambda: Exact(0.7),
    "nystrom": lambda: Nystrom(3, 0.1),
}


def spectrum(smallest: float, largest: float, seed: int) -> Tensor:
    return with_spectrum(torch.linspace(smallest, largest, SIZE, dtype=torch.float64), seed)


@cache
def systems() -> tuple[list[Tensor], list[Tensor]]:
    """Return what converges early and late, breaks down at once, later or by NaN, and is singular."""
    singular = spectrum(1.0, 3.0, 6)
    singular[2] = singular[:, 2] = 0
    broken = spectrum(1.0, 3.0, 7)
    broken[1, 1] = math.nan
    matrices = [
        spectrum(0.5, 4.0, 1),
        2.0 * torch.eye(SIZE, dtype=torch.float64),
        spectrum(-3.0, -1.0, 2),
        spectrum(-0.4, 4.0, 3),
        broken,
        spectrum(0.5, 4.0, 4),
        singular,
        spectrum(0.9, 1.1, 5),
        spectrum(1.0, 3.0, 8),
    ]
    vectors = [rand(SIZE, seed=20 + number) for number in range(len(matrices))]
    vectors[5] = torch.zeros(SIZE, dtype=torch.float64)
    vectors[8][0] = math.nan
    return matrices, vectors


NUM_TASKS = 9
LIKE = [torch.zeros(NUM_TASKS, *shape, dtype=torch.float64) for shape in SHAPES]


def loss_of(num_tasks: int | None) -> LowerView:
    return LowerView(LowerProblem("w", num_tasks=num_tasks), (), lambda theta, inputs: torch.zeros(()))


def together(solver: AbstractSolver, start: Tensor | None = None) -> SolveResult:
    matrices, vectors = systems()
    matrix = torch.stack(matrices)

    def matvec(vector: Vector) -> list[Tensor]:
        rows = flatten(vector, NUM_TASKS)
        return unflatten((matrix @ rows[..., None])[..., 0], LIKE, NUM_TASKS)

    given = unflatten(torch.stack(vectors), LIKE, NUM_TASKS)
    begun = None if start is None else unflatten(start, LIKE, NUM_TASKS)
    return solver.solve(matvec, given, start=begun, view=loss_of(NUM_TASKS))


def alone(solver: AbstractSolver, number: int, start: Tensor | None = None) -> SolveResult:
    matrices, vectors = systems()
    like = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def split(values: Tensor) -> list[Tensor]:
        return unflatten(values[None], like)

    given, begun = split(vectors[number]), None if start is None else split(start[number])
    return solver.solve(lambda u: split(matrices[number] @ flatten(u)[0]), given, start=begun)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", SOLVERS)
def test_tasks_equal_separate_solves(name: str, is_warm: bool) -> None:
    start = 0.5 * rand(NUM_TASKS, SIZE, seed=9) if is_warm else None
    found = together(SOLVERS[name](), start)
    assert [tensor.shape for tensor in found.solution] == [tensor.shape for tensor in LIKE]
    rows = flatten(found.solution, NUM_TASKS)
    singles = [alone(SOLVERS[name](), number, start) for number in range(NUM_TASKS)]
    for number, single in enumerate(singles):
        expected = flatten(single.solution)[0]
        is_broken = single.status in (Status.NON_FINITE, Status.NON_FINITE_VECTOR)
        scale = float(expected.nan_to_num().norm())
        assert torch.allclose(rows[number], expected, rtol=1e-7, atol=1e-9 * scale, equal_nan=True), number
        assert name == "identity" or bool(rows[number].isfinite().all()) is not is_broken
    assert found.task_statuses == tuple(single.status for single in singles)
    assert found.status is max((single.status for single in singles), key=list(Status).index)
    # One more where a task that broke down early is measured again at the end.
    assert found.num_products - max(single.num_products for single in singles) in (0, 1)
    known = [single.residual for single in singles if single.residual is not None]
    if found.residual is not None:
        assert found.residual == pytest.approx(max(known), rel=1e-6)
    assert all(single.task_statuses == () for single in singles)


@pytest.mark.parametrize(
    ("solver", "product"),
    [
        (NormalEquationConjugateGradient(200, 1e-11), "reverse"),
        (Nystrom(4, 1.0), "reverse"),
        *[(Neumann(4, 0.05), product) for product in ("reverse", "forward", "finite_difference")],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The .* solve at problem")
def test_implicit_maml_equals_a_loop_over_tasks(solver: AbstractSolver, product: Any) -> None:
    batch = maml.stacked(maml.episodes()[: maml.TASKS])
    program = maml.maml(maml.TASKS, Implicit(solver, product, report_every=1))
    found = program.gradient("meta", {"learner": batch, "meta": batch})
    singles = []
    for episode in maml.episodes()[: maml.TASKS]:
        single = maml.maml(None, Implicit(solver, product))
        singles.append(single.gradient("meta", {"learner": episode, "meta": episode}))
    for key, value in found.items():
        assert torch.allclose(value, sum(each[key] for each in singles) / maml.TASKS, rtol=1e-5, atol=1e-7)
    assert len(program.internals.algorithm_state("learner").last.task_statuses) == maml.TASKS
    if isinstance(solver, NormalEquationConjugateGradient):
        assert program.statistics()["learner/solver_cosine"] == pytest.approx(1.0, abs=1e-6)


ALGORITHMS: dict[str, Callable[[], AbstractHypergradient]] = {
    "penalty": lambda: Penalty(multiplier=5.0, growth=1.0, num_steps=2, step_size=0.1),
    "cold penalty": lambda: Penalty(multiplier=5.0, num_steps=2, step_size=0.1, warm_start=False),
    "soba": lambda: Implicit(FixedPoint(1, 0.1), warm_start=True),
    "saba": lambda: SABA(step_size=0.1, key="number"),
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.5),
}


def rounds() -> list[list[dict[str, Tensor]]]:
    """Return episodes of each task for one pullback after another: two batches that take turns."""
    data = [{**each, "number": torch.tensor(index // maml.TASKS)} for index, each in enumerate(maml.episodes())]
    return [data[: maml.TASKS], data[maml.TASKS :]] * 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_pullbacks_in_a_row_equal_those_of_a_loop_over_tasks(name: str, clip: float | None) -> None:
    make, settings = ALGORITHMS[name], {"gradient_clip_norm": clip}
    sees_steps = make().sees_steps

    def gradients(built: Program, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [built.gradient("meta", {"learner": [b] * 2 if sees_steps else b, "meta": b}) for b in batches]

    together = gradients(maml.maml(maml.TASKS, make(), **settings), [maml.stacked(each) for each in rounds()])
    alone = [
        gradients(maml.maml(None, make(), **settings), [each[task] for each in rounds()]) for task in range(maml.TASKS)
    ]
    for number, found in enumerate(together):
        for key, value in found.items():
            expected = sum(each[number][key] for each in alone) / maml.TASKS
            assert torch.allclose(value, expected, rtol=1e-9, atol=1e-12)


def low(batch: Any, *, w: Any, u: Any) -> Tensor:
    return (0.5 * batch["curvature"] * (w() - u()) ** 2 + 0.1 * w() ** 4).sum()


def high(batch: Any, *, w: Any, u: Any) -> Tensor:
    return 0.5 * (w() - batch["target"]).square().sum() + 0.2 * u().square().sum()


CURVATURE, TARGET = numbers(1.0, 2.0, 3.0)[:, None], numbers(0.3, -0.8, 0.5)[:, None] * numbers(1.0, 2.0)


def program(hypergradient: AbstractHypergradient, tasks: int | None, **settings: Any) -> Program:
    """Return w, pulled to u, with one curvature and target a task."""
    lower, upper = (Point(numbers(0.5, -0.3)), low), (Point(numbers(0.4, 0.2)), high)
    return two_levels(lower, upper, hypergradient, tasks=tasks, **settings)


def barrier() -> Penalty:
    return Penalty(rule="barrier", barrier=0.5, num_steps=3, step_size=0.1)


def test_one_multiplier_of_the_barrier_rule_serves_all_tasks() -> None:
    """The rule of the mean over tasks, written out; inner products over y are means as well."""
    built = program(barrier(), 3)
    u = numbers(0.4, 0.2)
    y = z = numbers(0.5, -0.3).expand(3, 2)
    v, direct = z - TARGET, 0.4 * u
    slope_of = lambda y: CURVATURE * (y - u) + 0.4 * y**3  # noqa: E731
    batch = {"curvature": CURVATURE, "target": TARGET}
    multipliers = []
    for _ in range(8):
        solved = y
        for _ in range(3):
            solved = solved - 0.1 * slope_of(solved)
        slope, shift = slope_of(y), (CURVATURE * (solved - y)).mean(0)
        square = slope.square().sum() / 3 + shift @ shift
        product = (v * slope).sum() / 3 + direct @ shift
        multipliers.append(max(float(0.5 - product / square), 0.0))
        y = y - 0.1 / max(multipliers[-1], 1.0) * (v + multipliers[-1] * slope)
        found = built.gradient("u", {"w": batch, "u": batch})["x"]
        assert torch.allclose(found, direct + multipliers[-1] * shift, rtol=1e-10)
    assert max(multipliers) > 1


SLOPES = numbers(1.0, -2.0, 3.0)[:, None] * numbers(1.0, 0.5)


def pull(batch: Any, *, w: Any, u: Any) -> Tensor:
    """With SGD, w is linear in u."""
    return 0.5 * (w() - u()).square().sum()


def slope_along_w(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    return (w() * batch).sum() + 0 * u().sum()


def linear(algorithm: EvolutionStrategies, tasks: int | None, slopes: Tensor) -> Program:
    """Return an upper problem of three tasks, whose lower one has as many or is shared."""
    roles, start, sgd = {"w": "w", "u": "u"}, Point(numbers(0.5, -0.3)), partial(torch.optim.SGD, lr=0.1)
    problems = [
        Problem("w", start, pull, roles=roles, optimizer=sgd, unroll_steps=3, hypergradient=algorithm, tasks=tasks),
        Problem(
            "u", Point(numbers(0.5, -0.3)), slope_along_w, roles=roles, stream=Stream(slopes, 3, shuffle=False), tasks=3
        ),
    ]
    return Program(problems, Graph({"u": ["w"]}, {"w": ["u"]}))


@pytest.mark.parametrize("broken", [False, True])
def test_evolution_estimates_the_gradient_of_each_upper_task_from_its_own_loss(broken: bool) -> None:
    """Two directions are enough for the two parameters of a task, not for the six of all; NaN stays in its task."""
    slopes = SLOPES.clone()
    if broken:
        slopes[0, 0] = float("nan")
    algorithm = EvolutionStrategies(2, sigma=0.1, directions="orthogonal")
    built = linear(algorithm, 3, slopes)
    found = built.gradient("u")["x"]
    expected = (1 - 0.9**3) * SLOPES
    expected[0] *= float("nan") if broken else 1.0
    assert torch.allclose(found, expected, rtol=1e-9, equal_nan=True)
    assert built.statistics()["w/evolution_failed_pairs"] == (2 if broken else 0)


BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", sorted(SOLVERS.keys() - {"identity"}))
def test_a_vector_that_is_not_finite_is_said_to_be_the_reason(name: str, bad: float) -> None:
    solver, hessian, vector = SOLVERS[name](), programs.definite(1), programs.vector(2)
    vector[1] = bad
    result = solver.solve(lambda u: [hessian @ u[0]], [vector])
    assert result.status is Status.NON_FINITE_VECTOR
    assert bool(result.solution[0].isnan().all())
    assert result.residual is None
    assert "an upper problem's loss" in solver.failures[result.status]


class Switch:
    """An upper loss that is times a number: NaN for a while."""

    factor = 1.0

    def __call__(self, batch: Any, *, model: Any, weigher: Any) -> Tensor:
        return every_algorithm.sample_losses(batch, model).mean() * self.factor


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in gradient.values()])


KEEPING: dict[str, Callable[[], AbstractHypergradient]] = {
    "warm cg": lambda: Implicit(ConjugateGradient(3, 1e-8, damping=10.0), warm_start=True),
    "warm normal_cg": lambda: Implicit(NormalEquationConjugateGradient(3, 1e-8, damping=10.0), warm_start=True),
    "warm fixed_point": lambda: Implicit(FixedPoint(3, 0.1), warm_start=True),
    "differences": lambda: Implicit(ConjugateGradient(3, 1e-8, damping=10.0), "finite_difference"),
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    "barrier": lambda: Penalty(rule="barrier", barrier=5.0, num_steps=2, step_size=0.1),
    "saba": lambda: SABA(step_size=0.1),
    "unrolled": Unrolled,
}


@pytest.mark.parametrize(
    ("name", "bad"), [*[(name, math.nan) for name in KEEPING], ("warm cg", math.inf), ("saba", -math.inf)]
)
@pytest.mark.filterwarnings("ignore:.*a right-hand side that is not finite")
def test_nothing_of_it_is_kept(name: str, bad: float) -> None:
    """After a gradient that is not finite the next one is what it is without."""
    switch, other = Switch(), Switch()
    program, control = (every_algorithm.program(KEEPING[name], upper=each) for each in (switch, other))
    for each in (program, control):
        Schedule(each).tick()
    switch.factor = bad
    for _ in range(2):
        assert not bool(flat(program.gradient("weigher")).isfinite().any())
    switch.factor = 1.0
    expected = flat(control.gradient("weigher"))
    assert float(expected.norm()) > 0
    assert torch.equal(flat(program.gradient("weigher")), expected)


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_through_the_derivative_of_a_solve() -> None:
    case = programs.nested(0.02)
    own_top, own_mid = case.losses["top"], case.losses["mid"]
    factors = {"top": 1.0, "mid": 1.0}
    case.losses |= {
        "top": lambda top, mid, low: own_top(top, mid, low) * factors["top"],
        "mid": lambda mid, low, top: own_mid(mid, low, top) * factors["mid"],
    }
    for problem in factors:
        factors |= {"top": 1.0, "mid": 1.0, problem: math.nan}
        for solver in (ConjugateGradient(20, 1e-10), Exact(), Neumann(20, 0.1), Identity()):
            found = case.program(lambda solver=solver: Implicit(solver)).gradient("top")["x"]
            assert bool(found.isnan().all()), (problem, solver)


@pytest.mark.parametrize("solver", [ConjugateGradient(3, damping=10.0), Exact(10.0), Neumann(3, 0.1)])
def test_each_time_that_it_begins_there_is_one_warning(solver: AbstractSolver) -> None:
    switch = Switch()
    program = every_algorithm.program(lambda: Implicit(solver), upper=switch)
    for _ in range(3):
        switch.factor = math.nan
        with pytest.warns(
            UserWarning, match="ended with a right-hand side that is not finite.*NaN is returned"
        ) as caught:
            program.gradient("weigher")
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            program.gradient("weigher")
            switch.factor = 1.0
            assert bool(flat(program.gradient("weigher")).isfinite().all())
