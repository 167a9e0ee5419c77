"""Hypergradients of drawn paths: binary gates, and policies, in programs with every algorithm of the library."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.hypergradient import SABA, Exact, FirstOrder, Identity, Implicit, Neumann, Penalty, Unrolled
from mlotool.losses import expected_path_cross_entropy
from mlotool.program import Schedule
from mlotool.spaces import BinaryPaths, Mixture, PathPolicy
from mlotool.spaces.shared.shared_graph import gated
from tests.hypergradient.every_algorithm import EVERY
from tests.spaces.shared.mixtures import (
    DECAY,
    NUM_STEPS,
    Dense,
    decayed,
    gradient,
    lower,
    program,
    simulated,
    slope,
    start,
    stepped,
    upper,
)

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

PRODUCTS = {"reverse": 1e-9, "forward": 1e-9, "finite_difference": 1e-5}
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
    p, h = logits[[2, 1]].softmax(0), logits[3:].softmax(0)
    taken = torch.eye(2, dtype=torch.float64)[1]
    p, h = taken + p - p.detach(), taken + h - h.detach()
    return torch.stack([torch.zeros((), dtype=torch.float64), p[1], p[0]]), h


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) < tolerance


EYE = torch.eye(14, dtype=torch.float64)
SOLVERS = {
    "exact": (Exact(), torch.linalg.inv),
    "identity": (Identity(0.1), lambda hessian: 0.1 * EYE),
    "neumann": (Neumann(2, 0.5), lambda hessian: 0.5 * (2 * EYE - 0.5 * hessian)),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_binary_gates_pass_through_a_solution(solver: str, product: Any) -> None:
    logits, theta = start()
    dense, (algorithm, inverse) = Dense(logits, theta, mix), SOLVERS[solver]
    expected = dense.through(inverse(dense.hessian)) - dense.direct
    assert expected.norm() > 0.01 * dense.direct.norm()
    found = gradient(Implicit(algorithm, product), theta, architecture=GivenPaths)
    assert_close(found - dense.direct, expected, PRODUCTS[product])


def test_binary_gates_pass_through_a_solution_by_single_loops_and_penalties() -> None:
    logits, theta = start()
    dense = Dense(logits, theta, mix)
    whole = dense.through(torch.linalg.inv(dense.hessian))
    assert_close(gradient(SABA(step_size=0.5), theta, 300, architecture=GivenPaths), whole, 1e-9)
    assert_close(gradient(FirstOrder(), theta, architecture=GivenPaths), dense.direct, 1e-12)
    y = theta
    for _ in range(4):
        y = y - 0.3 * (dense.v / 20 + slope(logits, y, mix))
    of_logits = torch.func.grad(lower, 0)
    expected = dense.direct + 20 * (of_logits(logits, y, mix) - of_logits(logits, theta, mix))
    found = gradient(Penalty(20.0, num_steps=4, step_size=0.3), theta, architecture=GivenPaths)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("algorithm", [Unrolled(), Unrolled(product="forward"), Unrolled(remat=False)])
def test_binary_gates_pass_through_steps(algorithm: Unrolled) -> None:
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


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("name", [each for each in EVERY if not each.startswith("ggn")])
def test_programs_of_drawn_paths_run_with_every_hypergradient(name: str, kind: str) -> None:
    made = program(EVERY[name](), start()[1], lower_steps=2, **PROGRAMS[kind])
    schedule = Schedule(made)
    for _ in range(4):
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
        made = program(Implicit(Identity(0.5), product), start()[1], **PROGRAMS[kind])
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
