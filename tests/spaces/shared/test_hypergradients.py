"""Architecture gradients of a mixture by every hypergradient of the library.

The reference is written with plain tensors and shares nothing with the space. Exact algorithms are compared with finite
differences of the solved or simulated problem; the others with the formula that they claim, in dense matrices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from mlotool.losses import path_cross_entropy
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import Operator, PathWeights, SharedSpace
from tests.programs import newton

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

DECAY, RATE, NUM_STEPS = 0.2, 0.3, 3
PRODUCTS = {"reverse": 1e-8, "forward": 1e-8, "finite_difference": 1e-5}


def make() -> SharedSpace:
    """A mixture of activations, then one of linear layers: linear in the parameters, so that the problem is convex."""
    activation = Operator("activation", "0", {"relu": None, "tanh": nn.Tanh, "same": nn.Identity})
    head = Operator("head", "1", {"bias": None, "plain": partial(nn.Linear, 3, 2, bias=False, dtype=torch.float64)})
    torch.manual_seed(0)
    return SharedSpace(
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 2, dtype=torch.float64)),
        [activation, head],
        inputs=[{"shape": [3], "dtype": "float64"}],
        seed=1,
    )


class Samples:
    """Two classes that overlap."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(2, (12,), generator=generator)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input": self.inputs[number], "target": self.targets[number]}


TRAIN, META = Samples(1), Samples(2)


def decayed(batch: Any, *, model: Any, paths: Any) -> Tensor:
    """Strongly convex in the parameters of the space."""
    decay = sum(each.square().sum() for each in model.parameters())
    return path_cross_entropy(batch, model=model, paths=paths).loss + 0.5 * DECAY * decay


def start() -> tuple[Tensor, Tensor]:
    """Return the logits, (5,), and the parameters, (14,)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64)
    return logits, 0.3 * torch.randn(14, generator=generator, dtype=torch.float64)


def plain(samples: Samples, logits: Tensor, theta: Tensor) -> Tensor:
    """Return the cross-entropy of the mixture."""
    p, h, x = logits[:3].softmax(0), logits[3:].softmax(0), samples.inputs
    z = p[0] * x.clamp_min(0) + p[1] * x.tanh() + p[2] * x
    weight, bias, other = theta[:6].reshape(2, 3), theta[6:8], theta[8:].reshape(2, 3)
    scores = h[0] * (z @ weight.T + bias) + h[1] * (z @ other.T)
    return (scores.logsumexp(1) - scores[torch.arange(12), samples.targets]).mean()


def lower(logits: Tensor, theta: Tensor) -> Tensor:
    return plain(TRAIN, logits, theta) + 0.5 * DECAY * theta.square().sum()


def upper(logits: Tensor, theta: Tensor) -> Tensor:
    return plain(META, logits, theta)


def slope(logits: Tensor, theta: Tensor) -> Tensor:
    return torch.func.grad(lower, 1)(logits, theta)


def solved(logits: Tensor) -> Tensor:
    return newton(lambda theta: slope(logits, theta), torch.zeros(14, dtype=torch.float64)).detach()


def simulated(logits: Tensor, theta: Tensor, steps: int = NUM_STEPS) -> Tensor:
    for _ in range(steps):
        theta = theta - RATE * slope(logits, theta)
    return theta


def differences(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Return the gradient by central differences, with the error of fourth order."""
    found = []
    for unit in torch.eye(len(logits), dtype=torch.float64):
        near, far = ((function(logits + h * unit) - function(logits - h * unit)) / (2 * h) for h in (1e-3, 2e-3))
        found.append((4 * near - far) / 3)
    return torch.stack(found)


def program(
    hypergradient: AbstractHypergradient, theta: Tensor, *, lower_steps: int = 1, rate: float = RATE, **settings: Any
) -> Program:
    """Return the problems at these parameters; a step of the upper one is its gradient."""
    logits, _ = start()
    space, weights = make(), PathWeights(make).double()
    with torch.no_grad():
        nn.utils.vector_to_parameters(theta, space.parameters())
        nn.utils.vector_to_parameters(logits, weights.parameters())
    names = [name for name, _ in space.named_parameters()]
    assert names == ["1.weight", "1.bias", "1@plain.weight"]
    roles = {"model": "model", "paths": "paths"}
    model = Problem(
        "model",
        space,
        decayed,
        roles=roles,
        stream=Stream(TRAIN, 12, shuffle=False),
        optimizer=partial(torch.optim.SGD, lr=rate),
        unroll_steps=lower_steps,
        hypergradient=hypergradient,
        **settings,
    )
    paths = Problem(
        "paths",
        weights,
        path_cross_entropy,
        roles=roles,
        stream=Stream(META, 12, shuffle=False),
        optimizer=partial(torch.optim.SGD, lr=1.0),
    )
    return Program([model, paths], Graph({"paths": ["model"]}, {"model": ["paths"]}))


def gradient(hypergradient: AbstractHypergradient, theta: Tensor, num_pullbacks: int = 1) -> Tensor:
    """Return the gradient of the logits, of the last of some pullbacks."""
    made = program(hypergradient, theta)
    for _ in range(num_pullbacks):
        found = made.gradient("paths")
    return torch.cat([*found.values()])


def stepped(hypergradient: AbstractHypergradient, **settings: Any) -> Tensor:
    """Return the gradient after steps of the lower problem that the program took itself."""
    made = program(hypergradient, start()[1], lower_steps=NUM_STEPS, **settings)
    schedule = Schedule(made)
    for _ in range(NUM_STEPS):
        schedule.tick()
    assert made.problems["paths"].optimizer is not None
    moved = nn.utils.parameters_to_vector(made.problems["paths"].module.parameters()).detach()
    return start()[0] - moved


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) < tolerance


class Dense:
    """Derivatives of the plain functions at a point."""

    def __init__(self, logits: Tensor, theta: Tensor) -> None:
        self.direct = torch.func.grad(upper, 0)(logits, theta)
        self.v = torch.func.grad(upper, 1)(logits, theta)
        self.hessian = torch.func.jacfwd(slope, 1)(logits, theta)
        self.cross = torch.func.jacfwd(slope, 0)(logits, theta)

    def through(self, inverse: Tensor) -> Tensor:
        """Return the gradient with a matrix in the place of `H^-1`."""
        return self.direct - self.cross.T @ inverse @ self.v


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


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("solver", CONVERGED)
def test_converged_implicit_gradients_are_finite_differences_of_the_solved_problem(solver: str, product: Any) -> None:
    logits, _ = start()
    theta = solved(logits)
    expected = differences(lambda each: upper(each, solved(each)), logits)
    direct = Dense(logits, theta).direct
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
