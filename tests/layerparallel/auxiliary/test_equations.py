"""Penalties, multipliers and their steps, and the speed-up, against autograd, loops and closed forms."""

import pytest
import torch
from torch import Tensor

from mlotool.layerparallel.auxiliary.equations import local_loss, next_multiplier, variable_slope
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup


def draw(seed: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weight", [1.0, 1 / 12])
@pytest.mark.parametrize("has_multiplier", [True, False])
def test_slopes_are_those_of_the_augmented_lagrangian(weight: float, has_multiplier: bool) -> None:
    """L = phi(lambda) + beta c norm(lambda - X)^2 - c <kappa, lambda - X>."""
    variable, state, beta = draw(0).requires_grad_(), draw(1).requires_grad_(), 3.0
    multiplier = draw(2) if has_multiplier else None
    phi = (variable**3).sum()
    lagrangian = phi + beta * weight * ((variable - state) ** 2).sum()
    if multiplier is not None:
        lagrangian = lagrangian - weight * (multiplier * (variable - state)).sum()
    of_variable, of_state = torch.autograd.grad(lagrangian, [variable, state], retain_graph=True)
    onward = torch.autograd.grad(phi, variable)[0]
    loss = local_loss(state, variable.detach(), multiplier, beta, weight)
    torch.testing.assert_close(torch.autograd.grad(loss, state)[0], of_state, rtol=1e-13, atol=1e-13)
    found = variable_slope(variable.detach(), state.detach(), multiplier, beta, weight, onward)
    torch.testing.assert_close(found, of_variable, rtol=1e-13, atol=1e-13)


def violation_after(rate: float, beta: float, num_steps: int) -> float:
    """Minimise the augmented Lagrangian of two scalar stages exactly, then move the multiplier; so many times.

    X = w (stage 0 on the input 1), phi = (lambda - 1)^2 / 2 + w^2 / 2, so that X is pulled one way and lambda another:
    L is quadratic in (w, lambda), and its stationary point is that of a 2 x 2 system.
    """
    multiplier, violation = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for _ in range(num_steps):
        matrix = torch.tensor([[1 + 2 * beta, -2 * beta], [-2 * beta, 1 + 2 * beta]], dtype=torch.float64)
        right = torch.stack([-multiplier, 1 + multiplier])
        state, variable = torch.linalg.solve(matrix, right)
        violation = variable - state
        multiplier = next_multiplier(multiplier, variable, state, rate)
    return violation.item()


def test_the_multiplier_rule_of_the_stationarity_and_the_printed_one() -> None:
    """The exact one leaves no violation after 11 steps at beta=5; the printed one leaves that of the penalty method."""
    beta, step_size = 5.0, 0.1
    penalty = violation_after(0.0, beta, 1)
    assert penalty == pytest.approx(1 / (1 + 4 * beta), rel=1e-12)
    assert abs(violation_after(2 * beta, beta, 11)) < 1e-12
    assert violation_after(step_size / (2 * beta), beta, 11) > 0.9 * penalty


def test_it_is_the_printed_formula() -> None:
    data, forward, backward, penalty, auxiliary, num_stages = 0.1, 1.1, 2.3, 0.05, 0.4, 3
    total = data + forward + backward
    printed = 1 / ((1 / num_stages) * (forward + backward) / total + (data + penalty + auxiliary) / total)
    assert predicted_speedup(BatchSeconds(forward, backward, data, penalty, auxiliary), num_stages) == pytest.approx(
        printed
    )
