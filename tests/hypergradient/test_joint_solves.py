"""Solves that compute all that a decision could ask for, and choose, find what solves that decide find."""

import math

import pytest
import torch
from torch import Tensor

from mlotool import ConjugateGradient, FixedPoint, Neumann, NormalEquationConjugateGradient
from mlotool.core.tracing import tracing
from mlotool.hypergradient.implicit import ImplicitState, TracedSolve
from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status, ended_with
from mlotool.problem.interface import LowerProblem, LowerView, Memory

SIZE = 6
SOLVERS = {
    "cg": ConjugateGradient(5, 1e-2),
    "cg to the end": ConjugateGradient(12, 1e-9, damping=0.1),
    "normal equations": NormalEquationConjugateGradient(4, 1e-2),
    "fixed point": FixedPoint(6, 0.2, tolerance=0.3),
    "fixed number": FixedPoint(3, 0.5),
    "neumann": Neumann(4, 0.6),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def systems() -> dict[str, tuple[Tensor, Tensor]]:
    factor = drawn(0, SIZE, SIZE)
    eigenvalues = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.3, -0.4], dtype=torch.float64)
    basis = torch.linalg.qr(factor).Q
    indefinite = basis @ torch.diag(eigenvalues) @ basis.T
    definite = factor @ factor.T / SIZE + torch.eye(SIZE, dtype=torch.float64)
    vector = drawn(1, SIZE)
    return {
        "definite": (definite, vector),
        "one eigenvalue": (2 * torch.eye(SIZE, dtype=torch.float64), vector),
        "indefinite": (indefinite, vector),
        "negative at first": (-definite, vector),
        "singular": (torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0], dtype=torch.float64)), vector),
        "nothing": (torch.zeros(SIZE, SIZE, dtype=torch.float64), vector),
        "no vector": (definite, torch.zeros(SIZE, dtype=torch.float64)),
        "not finite": (torch.full((SIZE, SIZE), torch.inf, dtype=torch.float64), vector),
        "not a number": (definite, vector * torch.nan),
    }


def solved(solver: AbstractSolver, matrix: Tensor, vector: Tensor, start: Tensor | None = None) -> SolveResult:
    """Solve a system, or several side by side."""

    def parts(whole: Tensor) -> list[Tensor]:
        return [whole[..., :2], whole[..., 2:]]

    def matvec(u: list[Tensor]) -> list[Tensor]:
        return parts((matrix @ torch.cat(u, -1)[..., None])[..., 0])

    view = None
    if matrix.dim() == 3:
        view = LowerView(
            LowerProblem("w", num_tasks=len(matrix)), tuple(parts(vector)), lambda theta, _: theta[0].sum()
        )
    return solver.solve(matvec, parts(vector), start=None if start is None else parts(start), view=view)


def check(solver: AbstractSolver, *system: Tensor) -> None:
    expected = solved(solver, *system)
    with tracing(is_joint=True) as course:
        found = solved(solver, *system)
        assert found.ending is not None
    # But for vectors whose squares leave the range of their type.
    assert len(course.conditions) <= 4
    for one, other in zip(expected.solution, found.solution, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=0, equal_nan=True)
    _, count, *codes = found.ending.tolist()
    assert count == expected.num_products
    assert ended_with(codes, has_tasks=bool(expected.task_statuses)) == (expected.status, expected.task_statuses)
    if expected.residual is not None:
        assert found.residual == pytest.approx(expected.residual, rel=1e-7)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("system", systems())
def test_nothing_is_decided_and_the_result_is_the_same(solver: AbstractSolver, system: str) -> None:
    check(solver, *systems()[system])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", [each for each in SOLVERS.values() if each.uses_start])
@pytest.mark.parametrize("system", systems())
@pytest.mark.parametrize("scale", [0.0, 1e-3, 10.0])
def test_a_start(solver: AbstractSolver, system: str, scale: float) -> None:
    matrix, vector = systems()[system]
    check(solver, matrix, vector, torch.linalg.pinv(matrix.nan_to_num(0.0, 1.0)) @ vector + scale * drawn(2, SIZE))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize(
    "names", [("definite", "one eigenvalue"), ("indefinite", "nothing", "definite"), tuple(systems())]
)
def test_tasks(solver: AbstractSolver, names: tuple[str, ...]) -> None:
    found = [systems()[name] for name in names]
    check(solver, *[torch.stack(each) for each in zip(*found, strict=True)])


def test_a_replay_reports_how_it_ended() -> None:
    memory, other, warned_of = Memory(ImplicitState(None)), Memory(ImplicitState(None)), set()
    solve = TracedSolve(Neumann(3, 0.1), "w", other, {Status.DIVERGED})
    code = [*Status].index(Status.DIVERGED)
    with pytest.warns(UserWarning, match="Neumann solve at problem 'w' ended with terms that grow"):
        solve.of(memory, warned_of).reported(torch.tensor([math.nan, 2, code], dtype=torch.float64))
    assert memory.value.last == SolveResult([], Status.DIVERGED, 2)
    assert (other.value.last, warned_of) == (None, {Status.DIVERGED})
