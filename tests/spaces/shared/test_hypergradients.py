"""Architecture gradients by the hypergradients of the library, of a mixture and of paths that are drawn.

The reference is written with plain tensors and shares nothing with the space. Exact algorithms are compared with finite
differences of the solved or simulated problem; the others with the formula that they claim, in dense matrices.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool import hypergradient as h
from mlotool.data.splits import InMemoryTensors
from mlotool.losses import expected_path_cross_entropy, path_cross_entropy
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import BinaryPaths, Mixture, Operator, PathPolicy, PathWeights, SharedSpace
from mlotool.spaces.shared.shared_graph import gated
from mlotool.spaces.shared.shared_space import AbstractArchitecture
from tests.hypergradient.every_algorithm import EVERY
from tests.programs import newton

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

DECAY, RATE, NUM_STEPS = 0.2, 0.3, 3


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


def drawn(seed: int) -> InMemoryTensors:
    """Return two classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return InMemoryTensors({"input": inputs, "target": torch.randint(2, (12,), generator=generator)})


TRAIN, META = drawn(1), drawn(2)


def decayed(batch: Any, *, model: Any, paths: Any) -> Tensor:
    """Strongly convex in the parameters of the space."""
    decay = sum(each.square().sum() for each in model.parameters())
    return path_cross_entropy(batch, model=model, paths=paths).loss + 0.5 * DECAY * decay


def start() -> tuple[Tensor, Tensor]:
    """Return the logits, (5,), and the parameters, (14,)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64)
    return logits, 0.3 * torch.randn(14, generator=generator, dtype=torch.float64)


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of activations and of layers."""
    return logits[:3].softmax(0), logits[3:].softmax(0)


Mix = Callable[[Tensor], tuple[Tensor, Tensor]]


def plain(samples: InMemoryTensors, logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    """Return the cross-entropy of the mixture."""
    (p, h), x = mix(logits), samples.values["input"]
    z = p[0] * x.clamp_min(0) + p[1] * x.tanh() + p[2] * x
    weight, bias, other = theta[:6].reshape(2, 3), theta[6:8], theta[8:].reshape(2, 3)
    scores = h[0] * (z @ weight.T + bias) + h[1] * (z @ other.T)
    return (scores.logsumexp(1) - scores[torch.arange(12), samples.values["target"]]).mean()


def lower(logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    return plain(TRAIN, logits, theta, mix) + 0.5 * DECAY * theta.square().sum()


def upper(logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    return plain(META, logits, theta, mix)


def slope(logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    return torch.func.grad(lower, 1)(logits, theta, mix)


def solved(logits: Tensor, start: Tensor) -> Tensor:
    return newton(lambda theta: slope(logits, theta), start).detach()


def simulated(logits: Tensor, theta: Tensor, steps: int = NUM_STEPS, mix: Mix = softmax) -> Tensor:
    for _ in range(steps):
        theta = theta - RATE * slope(logits, theta, mix)
    return theta


def differences(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Return the gradient by central differences, with the error of fourth order."""
    found = []
    for unit in torch.eye(len(logits), dtype=torch.float64):
        near, far = ((function(logits + h * unit) - function(logits - h * unit)) / (2 * h) for h in (1e-3, 2e-3))
        found.append((4 * near - far) / 3)
    return torch.stack(found)


def program(
    hypergradient: AbstractHypergradient,
    theta: Tensor,
    *,
    lower_steps: int = 1,
    architecture: Callable[..., AbstractArchitecture] = PathWeights,
    lower_loss: Callable[..., Any] = decayed,
    upper_loss: Callable[..., Any] = path_cross_entropy,
) -> Program:
    """Return the problems at these parameters; a step of the upper one is its gradient."""
    logits, _ = start()
    space, weights = make(), architecture(make).double()
    with torch.no_grad():
        nn.utils.vector_to_parameters(theta, space.parameters())
        nn.utils.vector_to_parameters(logits, weights.parameters())
    names = [name for name, _ in space.named_parameters()]
    assert names == ["1.weight", "1.bias", "1@plain.weight"]
    roles = {"model": "model", "paths": "paths"}
    how = [
        {"roles": roles, "stream": Stream(data, 12, shuffle=False), "optimizer": partial(torch.optim.SGD, lr=rate)}
        for data, rate in ((TRAIN, RATE), (META, 1.0))
    ]
    model = Problem("model", space, lower_loss, unroll_steps=lower_steps, hypergradient=hypergradient, **how[0])
    paths = Problem("paths", weights, upper_loss, **how[1])
    return Program([model, paths], Graph({"paths": ["model"]}, {"model": ["paths"]}))


def gradient(hypergradient: AbstractHypergradient, theta: Tensor, num_pullbacks: int = 1, **settings: Any) -> Tensor:
    """Return the gradient of the logits, of the last of some pullbacks."""
    made = program(hypergradient, theta, **settings)
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


class Dense:
    """Derivatives of the plain functions at a point.

    Args:
        logits: of the candidates.
        theta: of the space.
        mix: weights of the candidates from logits.
    """

    def __init__(self, logits: Tensor, theta: Tensor, mix: Mix = softmax) -> None:
        def slope(logits: Tensor, theta: Tensor) -> Tensor:
            return torch.func.grad(lower, 1)(logits, theta, mix)

        self.direct = torch.func.grad(upper, 0)(logits, theta, mix)
        self.v = torch.func.grad(upper, 1)(logits, theta, mix)
        self.hessian = torch.func.jacfwd(slope, 1)(logits, theta)
        self.cross = torch.func.jacfwd(slope, 0)(logits, theta)

    def through(self, inverse: Tensor) -> Tensor:
        """Return the gradient with a matrix in the place of `H^-1`."""
        return self.direct - self.cross.T @ inverse @ self.v


PRODUCTS = {"reverse": 1e-9, "forward": 1e-9, "finite_difference": 1e-5}


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) < tolerance


def neumann(hessian: Tensor, num_terms: int, step: float) -> Tensor:
    factor = torch.eye(14, dtype=torch.float64) - step * hessian
    return step * sum(torch.linalg.matrix_power(factor, k) for k in range(num_terms))


EYE = torch.eye(14, dtype=torch.float64)
CONVERGED: dict[str, h.AbstractSolver] = {
    "exact": h.Exact(),
    "cg": h.ConjugateGradient(40, 1e-12),
    "normal_cg": h.NormalEquationConjugateGradient(40, 1e-12),
    "neumann": h.Neumann(110, 1.0),
    "fixed_point": h.FixedPoint(110, 1.0, 0.0),
}
INVERSES: dict[str, tuple[h.AbstractSolver, Callable[[Tensor], Tensor]]] = {
    "identity": (h.Identity(0.1), lambda hessian: 0.1 * EYE),
    "neumann": (h.Neumann(3, 0.5), lambda hessian: neumann(hessian, 3, 0.5)),
    "fixed_point": (h.FixedPoint(3, 0.5), lambda hessian: neumann(hessian, 3, 0.5)),
    "cg": (h.ConjugateGradient(40, 1e-12, damping=1.0), lambda hessian: torch.linalg.inv(hessian + EYE)),
    "exact": (h.Exact(damping=0.5), lambda hessian: torch.linalg.inv(hessian + 0.5 * EYE)),
    "nystrom": (h.Nystrom(rank=14, rho=0.5), lambda hessian: torch.linalg.inv(hessian + 0.5 * EYE)),
    "sama": (h.OptimizerPreconditioner(), lambda hessian: RATE * EYE),
}


@cache
def converged() -> tuple[Tensor, Tensor, Tensor]:
    """Return the solution, its total gradient by finite differences, and the gradient beside the solution."""
    logits, _ = start()
    theta = solved(logits, torch.zeros(14, dtype=torch.float64))
    return theta, differences(lambda each: upper(each, solved(each, theta)), logits), Dense(logits, theta).direct


def pairs(solvers: Iterable[str]) -> list[tuple[str, str]]:
    """Return each solver with a product, and the first one with all: a solver sees a product as a function."""
    first, *others = solvers
    return [*((first, product) for product in PRODUCTS), *zip(others, cycle(PRODUCTS), strict=False)]


@pytest.mark.parametrize(("solver", "product"), pairs(CONVERGED))
def test_converged_implicit_gradients_are_finite_differences_of_the_solved_problem(solver: str, product: Any) -> None:
    theta, expected, direct = converged()
    # What passes through the solution is much of it.
    assert (expected - direct).norm() > 0.1 * expected.norm()
    assert_close(gradient(h.Implicit(CONVERGED[solver], product), theta), expected, max(PRODUCTS[product], 1e-8))


@pytest.mark.parametrize(("name", "product"), pairs(INVERSES))
def test_approximate_solvers_are_their_matrices(name: str, product: Any) -> None:
    solver, inverse = INVERSES[name]
    logits, theta = start()
    dense = Dense(logits, theta)
    found = gradient(h.Implicit(solver, product), theta)
    assert_close(found - dense.direct, dense.through(inverse(dense.hessian)) - dense.direct, PRODUCTS[product])


def test_darts_is_its_quotient_of_differences() -> None:
    """Equation 7 and 8, with the paper's radius."""
    logits, theta = start()
    v, direct = Dense(logits, theta).v, Dense(logits, theta).direct
    radius = 0.01 / v.norm()
    of_logits = torch.func.grad(lower, 0)
    quotient = (of_logits(logits, theta + radius * v) - of_logits(logits, theta - radius * v)) / (2 * radius)
    found = gradient(h.Implicit(h.Identity(0.025), "finite_difference", radius=0.01), theta)
    assert_close(found - direct, -0.025 * quotient, 1e-9)


def test_first_order_is_the_gradient_beside_the_solution() -> None:
    logits, theta = start()
    expected = differences(lambda each: upper(each, theta), logits)
    assert_close(gradient(h.FirstOrder(), theta), expected, 1e-9)


@pytest.mark.parametrize("algorithm", [h.Unrolled(), h.Unrolled(product="forward"), h.Unrolled(remat=False)])
def test_unrolled_gradients_are_finite_differences_of_the_simulated_steps(algorithm: h.Unrolled) -> None:
    logits, theta = start()
    expected = differences(lambda each: upper(each, simulated(each, theta)), logits)
    assert_close(stepped(algorithm), expected, 1e-9)


def test_evolution_strategies_are_differences_of_rollouts() -> None:
    logits, theta = start()
    expected = differences(lambda each: upper(each, simulated(each, theta)), logits)
    found = stepped(h.EvolutionStrategies(num_pairs=5, sigma=1e-3, directions="orthogonal"))
    assert_close(found, expected, 1e-5)


# Candidates that are drawn, of which the second one is taken.
DRAWN = {"activation_0": ("same", "tanh"), "head_0": ("bias", "plain")}


class GivenPaths(BinaryPaths):
    """Binary gates whose draws are given."""

    def _drawn(self, decision: Any) -> Mixture:
        both = DRAWN[decision.name]
        p = self.logits[decision.name][[decision.candidates.index(each) for each in both]].softmax(0)
        return Mixture(both, torch.eye(2, dtype=p.dtype)[1] + p - p.detach(), both[1])


def mix(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return gates with the gradient of probabilities: "same" against "tanh", "bias" against "plain"."""
    p, head = logits[[2, 1]].softmax(0), logits[3:].softmax(0)
    taken = torch.eye(2, dtype=torch.float64)[1]
    p, head = taken + p - p.detach(), taken + head - head.detach()
    return torch.stack([torch.zeros((), dtype=torch.float64), p[1], p[0]]), head


@pytest.mark.parametrize(("solver", "product"), pairs(["exact", "identity", "neumann"]))
def test_binary_gates_pass_through_a_solution(solver: str, product: Any) -> None:
    logits, theta = start()
    dense, (algorithm, inverse) = Dense(logits, theta, mix), INVERSES[solver]
    expected = dense.through(inverse(dense.hessian)) - dense.direct
    assert expected.norm() > 0.01 * dense.direct.norm()
    found = gradient(h.Implicit(algorithm, product), theta, architecture=GivenPaths)
    assert_close(found - dense.direct, expected, PRODUCTS[product])


def test_binary_gates_pass_through_a_solution_by_single_loops_and_penalties() -> None:
    logits, theta = start()
    dense = Dense(logits, theta, mix)
    whole = dense.through(torch.linalg.inv(dense.hessian))
    assert_close(gradient(h.SABA(step_size=1.0), theta, 100, architecture=GivenPaths), whole, 1e-9)
    assert_close(gradient(h.FirstOrder(), theta, architecture=GivenPaths), dense.direct, 1e-12)
    y = theta
    for _ in range(4):
        y = y - 0.3 * (dense.v / 20 + slope(logits, y, mix))
    of_logits = torch.func.grad(lower, 0)
    expected = dense.direct + 20 * (of_logits(logits, y, mix) - of_logits(logits, theta, mix))
    found = gradient(h.Penalty(20.0, num_steps=4, step_size=0.3), theta, architecture=GivenPaths)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("algorithm", [h.Unrolled(), h.Unrolled(product="forward"), h.Unrolled(remat=False)])
def test_binary_gates_pass_through_steps(algorithm: h.Unrolled) -> None:
    logits, theta = start()
    expected = torch.func.grad(lambda each: upper(each, simulated(each, theta, NUM_STEPS, mix), mix))(logits)
    assert_close(stepped(algorithm, architecture=GivenPaths), expected, 1e-9)


def policy_decayed(batch: Any, *, model: Any, paths: Any) -> Tensor:
    decay = sum(each.square().sum() for each in model.parameters())
    return expected_path_cross_entropy(batch, model=model, paths=paths).loss + 0.5 * DECAY * decay


PROGRAMS = {
    "binary": {"architecture": BinaryPaths, "lower_loss": decayed},
    "policy": {
        "architecture": PathPolicy,
        "lower_loss": policy_decayed,
        "upper_loss": partial(expected_path_cross_entropy, entropy=0.1),
    },
}

NAMES = [each for each in EVERY if not each.startswith("ggn")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "kind"), [*zip(NAMES, cycle(PROGRAMS), strict=False)])
def test_programs_of_drawn_paths_run_with_every_hypergradient(name: str, kind: str) -> None:
    made = program(EVERY[name](), start()[1], lower_steps=2, **PROGRAMS[kind])
    schedule = Schedule(made)
    for _ in range(2):
        schedule.tick()
    logits = nn.utils.parameters_to_vector(made.problems["paths"].module.parameters())
    theta = nn.utils.parameters_to_vector(made.problems["model"].module.parameters())
    assert logits.isfinite().all()
    assert theta.isfinite().all()
    # Two rollouts on the same random numbers mostly draw the same paths.
    assert name == "evolution" or not torch.equal(logits, start()[0])


@pytest.mark.parametrize("kind", PROGRAMS)
def test_products_agree_on_the_same_draws(kind: str) -> None:
    found = {}
    for product in PRODUCTS:
        made = program(h.Implicit(h.Identity(0.5), product), start()[1], **PROGRAMS[kind])
        made.random.manual_seed(7)
        found[product] = torch.cat([*made.gradient("paths").values()])
    for product, tolerance in PRODUCTS.items():
        assert_close(found[product], found["reverse"], tolerance)


def test_a_gate_has_a_gradient_for_its_weight_alone_and_derivatives_of_it() -> None:
    weight, z = torch.zeros((), dtype=torch.float64, requires_grad=True), torch.randn(3, dtype=torch.float64)
    z.requires_grad_()
    assert torch.autograd.grad(gated(weight, F.tanh(z)).sum(), [weight, z], allow_unused=True)[1] is None
    of_weight, of_result = torch.autograd.grad(gated(weight, F.tanh(z)).sum(), [weight, z], create_graph=True)
    assert torch.equal(of_result, torch.zeros_like(z))
    slope = 1 - z.tanh().square()
    assert torch.allclose(torch.autograd.grad(of_weight, z, retain_graph=True)[0], slope)
    assert torch.allclose(torch.autograd.grad(of_result.sum(), weight)[0], slope.sum())
    tangent = torch.func.jvp(lambda w, r: gated(w, r), (weight, z), (torch.ones_like(weight), torch.ones_like(z)))[1]
    assert torch.allclose(tangent, z)


@pytest.mark.parametrize("product", PRODUCTS)
def test_live_steps_alone_are_counted(product: Any) -> None:
    made = program(h.Implicit(h.Identity(0.1), product), start()[1], lower_steps=NUM_STEPS)
    schedule = Schedule(made)
    for _ in range(NUM_STEPS):
        schedule.tick()
    made.gradient("paths")
    counts = made.problems["model"].module.path_counts
    assert counts == {
        "activation_0": dict.fromkeys(["relu", "tanh", "same"], NUM_STEPS),
        "head_0": dict.fromkeys(["bias", "plain"], NUM_STEPS),
    }
