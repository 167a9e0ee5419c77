"""NaN stays NaN: no solver, multiplier, table or estimate makes a number of it, and none keeps it for later."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import (
    SABA,
    AbstractSolver,
    ConjugateGradient,
    Exact,
    FixedPoint,
    Identity,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
    Penalty,
    Status,
    Unrolled,
)
from mlotool.problem.interface import LowerProblem, LowerView
from mlotool.program import AbstractHypergradient, Schedule
from tests import programs
from tests.hypergradient import every_algorithm

SOLVERS: dict[str, AbstractSolver] = {
    "cg": ConjugateGradient(20, 1e-10),
    "damped cg": ConjugateGradient(20, 1e-10, damping=0.5),
    "normal_cg": NormalEquationConjugateGradient(20, 1e-10),
    "exact": Exact(),
    "neumann": Neumann(20, 0.1),
    "fixed_point": FixedPoint(20, 0.1),
    "fixed_point with tolerance": FixedPoint(200, 0.1, 1e-8),
    "nystrom": Nystrom(2, 0.1),
}
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
HESSIAN = programs.definite(1)


def solved(solver: AbstractSolver, vectors: Tensor, matrices: Tensor | None = None, start: Tensor | None = None) -> Any:
    """Solve systems side by side, one a row."""
    matrices = HESSIAN.expand(len(vectors), -1, -1) if matrices is None else matrices
    view = LowerView(LowerProblem("w", num_tasks=len(vectors)), (vectors,), lambda theta, _: theta[0].sum())
    return solver.solve(
        lambda u: [(matrices @ u[0][..., None])[..., 0]], [vectors], start=None if start is None else [start], view=view
    )


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_vector_that_is_not_finite_is_said_to_be_the_reason(solver: AbstractSolver, bad: float) -> None:
    vector = programs.vector(2)
    vector[1] = bad
    result = solver.solve(lambda u: [HESSIAN @ u[0]], [vector])
    assert result.status is Status.NON_FINITE_VECTOR
    assert bool(result.solution[0].isnan().all())
    assert result.residual is None
    assert "loss of a problem above" in solver.failures[result.status]


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_of_tasks_those_alone(solver: AbstractSolver, is_warm: bool) -> None:
    vectors = torch.stack([programs.vector(seed) for seed in range(4)])
    matrices = HESSIAN.repeat(4, 1, 1)
    start = 0.1 * vectors if is_warm and solver.uses_start else None
    good = solved(solver, vectors, matrices, start)
    vectors[1, 0], matrices[2, 0, 0] = math.nan, math.inf
    found = solved(solver, vectors, matrices, start)
    assert found.task_statuses[1:3] == (Status.NON_FINITE_VECTOR, Status.NON_FINITE)
    assert [bool(each.isnan().all()) for each in found.solution[0]] == [False, True, True, False]
    for sound in (0, 3):
        torch.testing.assert_close(found.solution[0][sound], good.solution[0][sound], rtol=1e-12, atol=0)


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


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", KEEPING)
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


@pytest.mark.parametrize("solver", [ConjugateGradient(20, 1e-10), Exact(), Neumann(20, 0.1), Identity()])
@pytest.mark.parametrize("problem", ["top", "mid"])
@pytest.mark.filterwarnings("ignore:.*not finite")
def test_through_the_derivative_of_a_solve(solver: AbstractSolver, problem: str) -> None:
    case = programs.nested(0.02)
    own_top, own_mid = case.losses["top"], case.losses["mid"]
    factors = {"top": 1.0, "mid": 1.0, problem: math.nan}
    case.losses |= {
        "top": lambda top, mid, low: own_top(top, mid, low) * factors["top"],
        "mid": lambda mid, low, top: own_mid(mid, low, top) * factors["mid"],
    }
    found = case.program(lambda: Implicit(solver)).gradient("top")["x"]
    assert bool(found.isnan().all())


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
