"""Systems that are solved side by side equal separate solves, and none disturbs another."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import (
    AbstractSolver,
    ConjugateGradient,
    Exact,
    FixedPoint,
    Identity,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
    SolveResult,
    Status,
)
from mlotool.hypergradient.products import FiniteDifferenceProduct, ReverseProduct
from mlotool.hypergradient.vector import add, choose, dot, flatten, norm, scaled, unflatten
from mlotool.problem.interface import LowerProblem, LowerView, Vector
from tests.problem import test_tasks as maml

SHAPES = [(2, 2), (), (3,)]
SIZE = 8
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


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(smallest: float, largest: float, seed: int) -> Tensor:
    basis = torch.linalg.qr(rand(SIZE, SIZE, seed=seed))[0]
    return basis @ torch.diag(torch.linspace(smallest, largest, SIZE, dtype=torch.float64)) @ basis.T


def systems() -> tuple[list[Tensor], list[Tensor]]:
    """Return matrices that converge early and late, break down at once, later, by NaN, and by a singular matrix."""
    singular = with_spectrum(1.0, 3.0, 6)
    singular[2] = singular[:, 2] = 0
    broken = with_spectrum(1.0, 3.0, 7)
    broken[1, 1] = math.nan
    matrices = [
        with_spectrum(0.5, 4.0, 1),
        2.0 * torch.eye(SIZE, dtype=torch.float64),
        with_spectrum(-3.0, -1.0, 2),
        with_spectrum(-0.4, 4.0, 3),
        broken,
        with_spectrum(0.5, 4.0, 4),
        singular,
        with_spectrum(0.9, 1.1, 5),
    ]
    vectors = [rand(SIZE, seed=20 + number) for number in range(len(matrices))]
    vectors[5] = torch.zeros(SIZE, dtype=torch.float64)
    return matrices, vectors


NUM_TASKS = 8
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
        is_broken = singles[number].status is Status.NON_FINITE
        scale = 0.0 if is_broken else float(expected.norm())
        assert torch.allclose(rows[number], expected, rtol=1e-7, atol=1e-9 * scale, equal_nan=True), number
        assert bool(rows[number].isfinite().all()) is not is_broken
    assert found.task_statuses == tuple(single.status for single in singles)
    assert found.status is max((single.status for single in singles), key=list(Status).index)
    # One more where a task that broke down early is measured again at the end.
    assert found.num_products - max(single.num_products for single in singles) in (0, 1)
    known = [single.residual for single in singles if single.residual is not None]
    if found.residual is not None:
        assert found.residual == pytest.approx(max(known), rel=1e-6)
    assert all(single.task_statuses == () for single in singles)


def test_the_statuses_of_conjugate_gradient() -> None:
    converged, negative = Status.CONVERGED, Status.NEGATIVE_CURVATURE
    found = together(ConjugateGradient(50, 1e-10)).task_statuses
    assert found[:4] == (converged, converged, negative, negative)
    assert found[4:6] == (Status.NON_FINITE, converged)


def test_a_finished_task_stays_where_it_is() -> None:
    """The identity needs one iteration; what the others do afterwards does not move it."""
    short, long = together(ConjugateGradient(1, 1e-10)), together(ConjugateGradient(50, 1e-10))
    for number in (1, 2, 4, 5):
        one, other = (flatten(each.solution, NUM_TASKS)[number] for each in (short, long))
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def test_vectors_by_task() -> None:
    a, b = ([rand(3, 2, 2, seed=seed), rand(3, seed=seed + 1)] for seed in (1, 3))
    rows, others = flatten(a, 3), flatten(b, 3)
    assert rows.shape == (3, 5)
    assert torch.allclose(dot(a, b, 3), (rows * others).sum(1))
    assert torch.allclose(norm(a, 3), rows.norm(dim=1))
    factor = rand(3, seed=5)
    assert torch.allclose(flatten(scaled(a, factor), 3), factor[:, None] * rows)
    assert torch.allclose(flatten(add(a, b, factor), 3), rows + factor[:, None] * others)
    condition = torch.tensor([True, False, True])
    assert torch.equal(flatten(choose(condition, a, b), 3), torch.where(condition[:, None], rows, others))
    assert all(torch.equal(x, y) for x, y in zip(unflatten(rows, a, 3), a, strict=True))


def test_a_small_task_has_a_finite_difference_of_its_own() -> None:
    """With one step for all, the product of the small one would be rounding."""

    def function(theta: Vector, inputs: Vector) -> Tensor:
        return (theta[0].exp() * inputs[0]).sum() + (theta[0] ** 3).sum()

    theta, inputs = (rand(2, 3, seed=1),), [rand(3, seed=2)]
    loss = replace(loss_of(2), theta=theta, own_loss=function)
    vector = [rand(2, 3, seed=3) * torch.tensor([[1.0], [1e-9]], dtype=torch.float64)]
    exact = ReverseProduct(loss, theta, inputs, [True])
    differences = FiniteDifferenceProduct(loss, theta, inputs, [True])
    expected, found = exact.hessian(vector)[0], differences.hessian(vector)[0]
    assert bool(((found - expected).norm(dim=1) < 1e-8 * expected.norm(dim=1)).all())
    assert torch.allclose(differences.cross(vector)[0], exact.cross(vector)[0], rtol=1e-7)


@pytest.mark.parametrize("product", ["reverse", "forward", "finite_difference"])
@pytest.mark.parametrize(
    "make",
    [lambda: NormalEquationConjugateGradient(200, 1e-11), lambda: Neumann(4, 0.05), lambda: Nystrom(4, 1.0)],
    ids=["normal_cg", "neumann", "nystrom"],
)
@pytest.mark.filterwarnings("ignore:The .* solve at problem")
def test_implicit_maml_equals_a_loop_over_tasks(make: Callable[[], AbstractSolver], product: Any) -> None:
    batch = maml.stacked(maml.episodes()[: maml.TASKS])
    solver = make()
    program = maml.maml(maml.TASKS, Implicit(solver, product, report_every=1))
    found = program.gradient("meta", {"learner": batch, "meta": batch})
    singles = []
    for episode in maml.episodes()[: maml.TASKS]:
        single = maml.maml(None, Implicit(make(), product))
        singles.append(single.gradient("meta", {"learner": episode, "meta": episode}))
    for key, value in found.items():
        assert torch.allclose(value, sum(each[key] for each in singles) / maml.TASKS, rtol=1e-5, atol=1e-7)
    assert len(program.algorithm_state("learner").last.task_statuses) == maml.TASKS
    if isinstance(solver, NormalEquationConjugateGradient):
        assert program.statistics()["learner/solver_cosine"] == pytest.approx(1.0, abs=1e-6)
