"""Autocast and loss scales: errors within what was measured elsewhere, and one problem's overflow is its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import ConjugateGradient, Identity, Implicit, Neumann, Penalty, Program, Schedule
from mlotool.core.gradient import full_precision
from mlotool.hypergradient.products.base import ReverseProduct
from mlotool.hypergradient.vector import norm
from mlotool.problem.interface import LowerProblem, LowerView
from tests.hypergradient.two_levels import two_levels


class Weights(nn.Module):
    """A weight for each sample."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_samples))

    def forward(self) -> Tensor:
        return torch.sigmoid(self.logits)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    target = (inputs @ torch.randn(8, 3, generator=generator)).argmax(1)
    return inputs[:32], target[:32], inputs[32:], target[32:]


def program(
    hypergradient: Any,
    precision: str = "fp32",
    *,
    upper: str | None = None,
    lower_loss: Callable[..., Tensor] | None = None,
) -> Program:
    """Learn a weight for each sample of a small classifier."""
    torch.manual_seed(0)
    inputs, target, clean_inputs, clean_target = data()

    def weighted(batch: Any, *, w: Any, u: Any) -> Tensor:
        losses = nn.functional.cross_entropy(w(inputs), target, reduction="none")
        return (u() * losses).mean() + 0.05 * sum(tensor.square().sum() for tensor in w.parameters())

    def clean(batch: Any, *, w: Any) -> Tensor:
        return nn.functional.cross_entropy(w(clean_inputs), clean_target)

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    of_upper = {"optimizer": partial(torch.optim.SGD, lr=1.0), "precision": upper or precision}
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1), "precision": precision, "of_upper": of_upper}
    found = two_levels((model, lower_loss or weighted), (Weights(32), clean), hypergradient, **settings)
    # Some steps towards the solution, the same in all precisions.
    with torch.no_grad(), full_precision():
        for tensor, value in zip(model.parameters(), _trained(weighted), strict=True):
            tensor.copy_(value)
    return found


def _trained(loss: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    model, weigher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), Weights(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss(None, w=model, u=weigher).backward()
        optimizer.step()
    return [tensor.detach() for tensor in model.parameters()]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("fp16", 0.003)])
@pytest.mark.parametrize("length", [1.0, 1e-6])
def test_hessian_products_keep_their_digits_at_any_length(precision: str, bound: float, length: float) -> None:
    inputs, target, _, _ = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    theta = [tensor.detach() for tensor in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    def product(dtype: torch.dtype | None, label: str, vector: list[Tensor]) -> list[Tensor]:
        def loss(theta: Any, _: Any) -> Tensor:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
                logits = torch.func.functional_call(model, dict(zip(names, theta, strict=True)), (inputs,))
                return nn.functional.cross_entropy(logits, target)

        lower_loss = LowerView(LowerProblem("a", precision=label), tuple(theta), loss)
        return ReverseProduct(lower_loss, theta, [], []).hessian(vector)

    direction = [torch.randn_like(tensor) for tensor in theta]
    vector = [tensor * (length / norm(direction)) for tensor in direction]
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    found, expected = product(dtypes[precision], precision, vector), product(None, "fp32", vector)
    difference = norm([a - b for a, b in zip(found, expected, strict=True)])
    assert float(difference / norm(expected)) < bound


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.04), ("fp16", 0.006)])
@pytest.mark.parametrize(
    "solver", [Identity(0.1), Neumann(5, 0.1), ConjugateGradient(20, tolerance=1e-6, damping=0.1)], ids=repr
)
def test_hypergradients_are_near_those_of_full_precision(precision: str, bound: float, solver: Any) -> None:
    expected = program(Implicit(solver)).gradient("u")["logits"]
    found = program(Implicit(solver), precision).gradient("u")["logits"]
    assert 0 < error(found, expected) < bound


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_finite_differences_and_penalties_of_the_lower_loss_are_taken_in_full_precision(precision: str) -> None:
    for algorithm in (
        lambda: Implicit(ConjugateGradient(5), "finite_difference"),
        lambda: Penalty(multiplier=10.0, num_steps=3),
    ):
        expected = program(algorithm()).gradient("u")["logits"]
        # The upper loss is in full precision in both: what is left is the lower one's.
        found = program(algorithm(), precision, upper="fp32").gradient("u")["logits"]
        assert torch.equal(found, expected)


def test_an_overflow_skips_the_step_of_its_problem_alone() -> None:
    def overflowing(batch: Any, *, w: Any, u: Any) -> Tensor:
        # Its slope is 1e3 at a loss scale of 2^16: too much for fp16.
        return (1e3 * w(data()[0]) * u().mean()).float().mean()

    found = program(Implicit(Identity(), "finite_difference"), "fp16", lower_loss=overflowing)
    model, weigher = found.problems["w"], found.problems["u"]
    before = {key: tensor.clone() for key, tensor in model.theta.items()}
    Schedule(found).tick()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.theta.items())
    assert model.optimizer_step.loss_scale is not None and weigher.optimizer_step.loss_scale is not None
    assert (model.optimizer_step.loss_scale.value, weigher.optimizer_step.loss_scale.value) == (2.0**15, 2.0**16)
    assert not torch.equal(weigher.theta["logits"], torch.zeros(32))
    state = found.state_dict()
    other = program(Implicit(Identity(), "finite_difference"), "fp16", lower_loss=overflowing)
    other.load_state_dict(state)
    assert other.problems["w"].optimizer_step.loss_scale.value == 2.0**15  # type: ignore[union-attr]
