"""Autocast and loss scales: errors within what was measured elsewhere, and one problem's overflow is its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import ConjugateGradient, Identity, Implicit, Neumann, Penalty, Program, Schedule
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
    size: float = 1.0,
) -> Program:
    """Learn a weight for each sample of a small classifier."""
    torch.manual_seed(0)
    inputs, target, clean_inputs, clean_target = data()

    def weighted(batch: Any, *, w: Any, u: Any) -> Tensor:
        losses = nn.functional.cross_entropy(w(inputs), target, reduction="none")
        return (u() * losses).mean() + 0.25 * sum(tensor.square().sum() for tensor in w.parameters())

    def clean(batch: Any, *, w: Any) -> Tensor:
        return size * nn.functional.cross_entropy(w(clean_inputs), clean_target)

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    of_upper = {"optimizer": partial(torch.optim.SGD, lr=1.0), "precision": upper or precision}
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1), "precision": precision, "of_upper": of_upper}
    return two_levels((model, lower_loss or weighted), (Weights(32), clean), hypergradient, **settings)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.01), ("fp16", 0.001)])
@pytest.mark.parametrize(
    "solver", [Identity(0.1), Neumann(5, 0.1), ConjugateGradient(20, tolerance=1e-6, damping=0.1)], ids=repr
)
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_hypergradients_are_near_those_of_full_precision(
    precision: str, bound: float, solver: Any, size: float
) -> None:
    """Also below a tiny loss, whose slope is a vector that fp16 would lose."""
    upper = precision if size == 1.0 else "fp32"
    expected = program(Implicit(solver), size=size).gradient("u")["logits"]
    found = program(Implicit(solver), precision, upper=upper, size=size).gradient("u")["logits"]
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
