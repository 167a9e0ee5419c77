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
    EvolutionStrategies,
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
from mlotool.hypergradient.vector import apart
from mlotool.problem.interface import LowerProblem, LowerView
from mlotool.problem.optimizers.adam import ADAM_RULE
from mlotool.problem.optimizers.optimizer_step import LossScale, clipped
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


def test_nystrom_notices_what_none_of_its_columns_shows() -> None:
    diagonal = torch.ones(8, dtype=torch.float64)
    diagonal[4] = math.nan
    vector = torch.ones(8, dtype=torch.float64)
    result = Nystrom(2, 0.1).solve(lambda u: [torch.where(u[0] == 0, 0.0, diagonal * u[0])], [vector])
    assert result.status is Status.NON_FINITE
    assert bool(result.solution[0].isnan().all())


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


@pytest.mark.parametrize("shaping", ["none", "rank"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_estimate_without_any_number_is_none(shaping: Any, persistent: bool) -> None:
    """A pair that diverges is left out; of no pair there is nothing left."""
    settings = {"num_pairs": 2, "sigma": 0.01, "shaping": shaping, "persistent": persistent}
    switch = Switch()
    program = every_algorithm.program(lambda: EvolutionStrategies(**settings), upper=switch)
    Schedule(program).tick()
    switch.factor = math.nan
    assert bool(flat(program.gradient("weigher")).isnan().all())
    switch.factor = 1.0
    assert bool(flat(program.gradient("weigher")).isfinite().all())


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("num_tasks", [None, 2])
def test_clipping_leaves_no_part_of_a_gradient_whole(bad: float, num_tasks: int | None) -> None:
    gradient = [torch.full((2, 3), 5.0), torch.full((2, 1), 5.0)]
    gradient[1][1, 0] = bad
    found, norm = clipped(gradient, 1.0, num_tasks)
    assert bool(norm.isfinite().sum() == (0 if num_tasks is None else 1))
    lost = found[0][1] if num_tasks else found[0]
    assert not bool((lost == 5.0).any())
    assert not bool(found[1][1].isfinite().any())
    if num_tasks:
        assert math.isclose(float(torch.cat([found[0][0], found[1][0]]).norm()), 1.0, rel_tol=1e-5)


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


def test_an_estimate_of_tasks_is_none_for_those_without_a_number() -> None:
    values = torch.tensor([[[1.0, math.nan], [3.0, 1.0]], [[2.0, math.inf], [1.0, 2.0]]])
    weights, _ = EvolutionStrategies(num_pairs=2, sigma=0.5)._weights(values)
    torch.testing.assert_close(weights, torch.tensor([[-1.0, math.nan], [0.5, math.nan]]), equal_nan=True)


def test_a_step_of_adam_with_a_second_moment_of_nan_is_nan() -> None:
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False, "amsgrad": False}
    one, nothing = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    state = {"step": torch.tensor(1.0), "exp_avg": nothing, "exp_avg_sq": one * math.nan}
    assert bool(ADAM_RULE.update(one, one, state, settings)[0].isnan())


def test_a_loss_scale_lets_a_nan_pass_in_the_end() -> None:
    """It looks for an overflow first."""
    scale, bad = LossScale(), [torch.tensor([1.0, math.nan])]
    assert [scale.accepts(bad) for _ in range(42)] == [False] * 40 + [True] * 2
    assert scale.accepts([torch.ones(1)])


@pytest.mark.parametrize(("a", "b", "expected"), [(1.0, math.nan, math.nan), (math.nan, math.nan, math.nan), (0, 0, 0)])
def test_how_far_apart_nan_is(a: float, b: float, expected: float) -> None:
    found = apart([torch.tensor([float(a)])], [torch.tensor([float(b)])])
    assert found == expected or (math.isnan(found) and math.isnan(expected))
