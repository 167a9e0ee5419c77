"""Architecture gradients of a mixture by every hypergradient of the library.

The reference is written with plain tensors and shares nothing with the space. Exact algorithms are compared with finite
differences of the solved or simulated problem; the others with the formula that they claim, in dense matrices.
"""

from collections.abc import Callable
from functools import cache
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
    FirstOrder,
    FixedPoint,
    Identity,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
    OptimizerPreconditioner,
    Penalty,
    Unrolled,
)
from tests.spaces.shared.mixtures import (
    NUM_STEPS,
    RATE,
    Dense,
    differences,
    gradient,
    lower,
    simulated,
    slope,
    solved,
    start,
    stepped,
    upper,
)

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

PRODUCTS = {"reverse": 1e-8, "forward": 1e-8, "finite_difference": 1e-5}


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) < tolerance


def neumann(hessian: Tensor, num_terms: int, step: float) -> Tensor:
    factor = torch.eye(14, dtype=torch.float64) - step * hessian
    return step * sum(torch.linalg.matrix_power(factor, k) for k in range(num_terms))


EYE = torch.eye(14, dtype=torch.float64)
CONVERGED: dict[str, AbstractSolver] = {
    "exact": Exact(),
    "cg": ConjugateGradient(40, 1e-12),
    "normal_cg": NormalEquationConjugateGradient(40, 1e-12),
    "neumann": Neumann(110, 1.0),
    "fixed_point": FixedPoint(110, 1.0, 0.0),
}
INVERSES: dict[str, tuple[AbstractSolver, Callable[[Tensor], Tensor]]] = {
    "identity": (Identity(0.1), lambda hessian: 0.1 * EYE),
    "neumann": (Neumann(3, 0.5), lambda hessian: neumann(hessian, 3, 0.5)),
    "fixed_point": (FixedPoint(3, 0.5), lambda hessian: neumann(hessian, 3, 0.5)),
    "cg": (ConjugateGradient(40, 1e-12, damping=1.0), lambda hessian: torch.linalg.inv(hessian + EYE)),
    "exact": (Exact(damping=0.5), lambda hessian: torch.linalg.inv(hessian + 0.5 * EYE)),
    "nystrom": (Nystrom(rank=14, rho=0.5), lambda hessian: torch.linalg.inv(hessian + 0.5 * EYE)),
    "sama": (OptimizerPreconditioner(), lambda hessian: RATE * EYE),
}


@cache
def converged() -> tuple[Tensor, Tensor, Tensor]:
    """Return the solution, its total gradient by finite differences, and the gradient beside the solution."""
    logits, _ = start()
    theta = solved(logits)
    return theta, differences(lambda each: upper(each, solved(each)), logits), Dense(logits, theta).direct


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("solver", CONVERGED)
def test_converged_implicit_gradients_are_finite_differences_of_the_solved_problem(solver: str, product: Any) -> None:
    theta, expected, direct = converged()
    # What passes through the solution is much of it.
    assert (expected - direct).norm() > 0.1 * expected.norm()
    assert_close(gradient(Implicit(CONVERGED[solver], product), theta), expected, max(PRODUCTS[product], 1e-8))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", INVERSES)
def test_approximate_solvers_are_their_matrices(name: str, product: Any) -> None:
    solver, inverse = INVERSES[name]
    logits, theta = start()
    dense = Dense(logits, theta)
    found = gradient(Implicit(solver, product), theta)
    assert_close(found - dense.direct, dense.through(inverse(dense.hessian)) - dense.direct, PRODUCTS[product])


def test_darts_is_its_quotient_of_differences() -> None:
    """Equation 7 and 8, with the paper's radius."""
    logits, theta = start()
    v, direct = Dense(logits, theta).v, Dense(logits, theta).direct
    radius = 0.01 / v.norm()
    of_logits = torch.func.grad(lower, 0)
    quotient = (of_logits(logits, theta + radius * v) - of_logits(logits, theta - radius * v)) / (2 * radius)
    found = gradient(Implicit(Identity(0.025), "finite_difference", radius=0.01), theta)
    assert_close(found - direct, -0.025 * quotient, 1e-9)


def test_first_order_is_the_gradient_beside_the_solution() -> None:
    logits, theta = start()
    expected = differences(lambda each: upper(each, theta), logits)
    assert_close(gradient(FirstOrder(), theta), expected, 1e-9)


@pytest.mark.parametrize("num_pullbacks", [1, 4, 60])
def test_soba_is_a_step_a_pullback_of_the_linear_system(num_pullbacks: int) -> None:
    logits, theta = start()
    dense = Dense(logits, theta)
    found = gradient(Implicit(FixedPoint(1, 0.5), warm_start=True), theta, num_pullbacks)
    # The first one begins at zero.
    expected = dense.through(neumann(dense.hessian, num_pullbacks, 0.5))
    assert_close(found - dense.direct, expected - dense.direct, 1e-10)


def test_saba_comes_to_the_solution_of_the_linear_system() -> None:
    logits, theta = start()
    dense = Dense(logits, theta)
    found = gradient(SABA(step_size=0.5), theta, 300)
    assert_close(found, dense.through(torch.linalg.inv(dense.hessian)), 1e-9)


def test_a_fixed_penalty_is_the_difference_of_two_gradients() -> None:
    logits, theta = start()
    multiplier, steps, rate, v = 20.0, 4, 0.3, Dense(logits, theta).v
    y = theta
    for _ in range(steps):
        y = y - rate * (v / multiplier + slope(logits, y))
    of_logits = torch.func.grad(lower, 0)
    found = gradient(Penalty(multiplier, num_steps=steps, step_size=rate), theta)
    expected = multiplier * (of_logits(logits, y) - of_logits(logits, theta))
    assert_close(found - Dense(logits, theta).direct, expected, 1e-9)


def test_the_barrier_is_a_multiple_of_a_difference_of_two_gradients() -> None:
    logits, theta = start()
    dense, barrier, steps, rate = Dense(logits, theta), 0.5, 4, 0.3
    z = theta
    for _ in range(steps):
        z = z - rate * slope(logits, z)
    of_logits = torch.func.grad(lower, 0)
    shift, pull = of_logits(logits, theta) - of_logits(logits, z), slope(logits, theta)
    multiplier = barrier - (dense.direct @ shift + dense.v @ pull) / (shift @ shift + pull @ pull)
    found = gradient(Penalty(rule="barrier", barrier=barrier, num_steps=steps, step_size=rate), theta)
    assert multiplier > 0
    assert_close(found - dense.direct, multiplier * shift, 1e-9)


@pytest.mark.parametrize("algorithm", [Unrolled(), Unrolled(product="forward"), Unrolled(remat=False)])
def test_unrolled_gradients_are_finite_differences_of_the_simulated_steps(algorithm: Unrolled) -> None:
    logits, theta = start()
    expected = differences(lambda each: upper(each, simulated(each, theta)), logits)
    assert_close(stepped(algorithm), expected, 1e-9)


def test_a_horizon_of_one_step_is_the_gradient_through_that_step() -> None:
    logits, theta = start()
    before = simulated(logits, theta, NUM_STEPS - 1)
    expected = differences(lambda each: upper(each, simulated(each, before, 1)), logits)
    assert_close(stepped(Unrolled(horizon=1)), expected, 1e-9)


def test_unrolled_without_second_order_leaves_the_solution_out() -> None:
    """The start does not depend on the logits, so that nothing is left but the gradient beside the solution."""
    logits, theta = start()
    expected = differences(lambda each: upper(each, simulated(logits, theta)), logits)
    assert_close(stepped(Unrolled(second_order=False)), expected, 1e-9)


def test_evolution_strategies_are_differences_of_rollouts() -> None:
    logits, theta = start()
    expected = differences(lambda each: upper(each, simulated(each, theta)), logits)
    found = stepped(EvolutionStrategies(num_pairs=5, sigma=1e-3, directions="orthogonal"))
    assert_close(found, expected, 1e-5)
