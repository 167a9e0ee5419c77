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
from mlotool.losses import expected_path_cross_entropy
from mlotool.program import Schedule
from mlotool.spaces import BinaryPaths, Mixture, PathPolicy
from mlotool.spaces.shared.shared_graph import gated
from tests.hypergradient.every_algorithm import EVERY
from tests.spaces.shared import mixtures as m

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

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
    "sama": (h.OptimizerPreconditioner(), lambda hessian: m.RATE * EYE),
}


@cache
def converged() -> tuple[Tensor, Tensor, Tensor]:
    """Return the solution, its total gradient by finite differences, and the gradient beside the solution."""
    logits, _ = m.start()
    theta = m.solved(logits)
    return theta, m.differences(lambda each: m.upper(each, m.solved(each)), logits), m.Dense(logits, theta).direct


def pairs(solvers: Iterable[str]) -> list[tuple[str, str]]:
    """Return each solver with a product, and the first one with all: a solver sees a product as a function."""
    first, *others = solvers
    return [*((first, product) for product in PRODUCTS), *zip(others, cycle(PRODUCTS), strict=False)]


@pytest.mark.parametrize(("solver", "product"), pairs(CONVERGED))
def test_converged_implicit_gradients_are_finite_differences_of_the_solved_problem(solver: str, product: Any) -> None:
    theta, expected, direct = converged()
    # What passes through the solution is much of it.
    assert (expected - direct).norm() > 0.1 * expected.norm()
    assert_close(m.gradient(h.Implicit(CONVERGED[solver], product), theta), expected, max(PRODUCTS[product], 1e-8))


@pytest.mark.parametrize(("name", "product"), pairs(INVERSES))
def test_approximate_solvers_are_their_matrices(name: str, product: Any) -> None:
    solver, inverse = INVERSES[name]
    logits, theta = m.start()
    dense = m.Dense(logits, theta)
    found = m.gradient(h.Implicit(solver, product), theta)
    assert_close(found - dense.direct, dense.through(inverse(dense.hessian)) - dense.direct, PRODUCTS[product])


def test_darts_is_its_quotient_of_differences() -> None:
    """Equation 7 and 8, with the paper's radius."""
    logits, theta = m.start()
    v, direct = m.Dense(logits, theta).v, m.Dense(logits, theta).direct
    radius = 0.01 / v.norm()
    of_logits = torch.func.grad(m.lower, 0)
    quotient = (of_logits(logits, theta + radius * v) - of_logits(logits, theta - radius * v)) / (2 * radius)
    found = m.gradient(h.Implicit(h.Identity(0.025), "finite_difference", radius=0.01), theta)
    assert_close(found - direct, -0.025 * quotient, 1e-9)


def test_first_order_is_the_gradient_beside_the_solution() -> None:
    logits, theta = m.start()
    expected = m.differences(lambda each: m.upper(each, theta), logits)
    assert_close(m.gradient(h.FirstOrder(), theta), expected, 1e-9)


@pytest.mark.parametrize("algorithm", [h.Unrolled(), h.Unrolled(product="forward"), h.Unrolled(remat=False)])
def test_unrolled_gradients_are_finite_differences_of_the_simulated_steps(algorithm: h.Unrolled) -> None:
    logits, theta = m.start()
    expected = m.differences(lambda each: m.upper(each, m.simulated(each, theta)), logits)
    assert_close(m.stepped(algorithm), expected, 1e-9)


def test_evolution_strategies_are_differences_of_rollouts() -> None:
    logits, theta = m.start()
    expected = m.differences(lambda each: m.upper(each, m.simulated(each, theta)), logits)
    found = m.stepped(h.EvolutionStrategies(num_pairs=5, sigma=1e-3, directions="orthogonal"))
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
    logits, theta = m.start()
    dense, (algorithm, inverse) = m.Dense(logits, theta, mix), INVERSES[solver]
    expected = dense.through(inverse(dense.hessian)) - dense.direct
    assert expected.norm() > 0.01 * dense.direct.norm()
    found = m.gradient(h.Implicit(algorithm, product), theta, architecture=GivenPaths)
    assert_close(found - dense.direct, expected, PRODUCTS[product])


def test_binary_gates_pass_through_a_solution_by_single_loops_and_penalties() -> None:
    logits, theta = m.start()
    dense = m.Dense(logits, theta, mix)
    whole = dense.through(torch.linalg.inv(dense.hessian))
    assert_close(m.gradient(h.SABA(step_size=1.0), theta, 100, architecture=GivenPaths), whole, 1e-9)
    assert_close(m.gradient(h.FirstOrder(), theta, architecture=GivenPaths), dense.direct, 1e-12)
    y = theta
    for _ in range(4):
        y = y - 0.3 * (dense.v / 20 + m.slope(logits, y, mix))
    of_logits = torch.func.grad(m.lower, 0)
    expected = dense.direct + 20 * (of_logits(logits, y, mix) - of_logits(logits, theta, mix))
    found = m.gradient(h.Penalty(20.0, num_steps=4, step_size=0.3), theta, architecture=GivenPaths)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("algorithm", [h.Unrolled(), h.Unrolled(product="forward"), h.Unrolled(remat=False)])
def test_binary_gates_pass_through_steps(algorithm: h.Unrolled) -> None:
    logits, theta = m.start()
    expected = torch.func.grad(lambda each: m.upper(each, m.simulated(each, theta, m.NUM_STEPS, mix), mix))(logits)
    assert_close(m.stepped(algorithm, architecture=GivenPaths), expected, 1e-9)


def policy_decayed(batch: Any, *, model: Any, paths: Any) -> Tensor:
    decay = sum(each.square().sum() for each in model.parameters())
    return expected_path_cross_entropy(batch, model=model, paths=paths).loss + 0.5 * m.DECAY * decay


PROGRAMS = {
    "binary": {"architecture": BinaryPaths, "lower_loss": m.decayed},
    "policy": {
        "architecture": PathPolicy,
        "lower_loss": policy_decayed,
        "upper_loss": partial(expected_path_cross_entropy, entropy=0.1),
    },
}


NAMES = [each for each in EVERY if not each.startswith("ggn")]


@pytest.mark.parametrize(("name", "kind"), [*zip(NAMES, cycle(PROGRAMS), strict=False)])
def test_programs_of_drawn_paths_run_with_every_hypergradient(name: str, kind: str) -> None:
    made = m.program(EVERY[name](), m.start()[1], lower_steps=2, **PROGRAMS[kind])
    schedule = Schedule(made)
    for _ in range(4):
        schedule.tick()
    logits = nn.utils.parameters_to_vector(made.problems["paths"].module.parameters())
    theta = nn.utils.parameters_to_vector(made.problems["model"].module.parameters())
    assert logits.isfinite().all()
    assert theta.isfinite().all()
    # Two rollouts on the same random numbers mostly draw the same paths.
    assert name == "evolution" or not torch.equal(logits, m.start()[0])


@pytest.mark.parametrize("kind", PROGRAMS)
def test_products_agree_on_the_same_draws(kind: str) -> None:
    found = {}
    for product in PRODUCTS:
        made = m.program(h.Implicit(h.Identity(0.5), product), m.start()[1], **PROGRAMS[kind])
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
