"""The optimizer's Jacobian against finite differences of torch's own optimizers."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.hypergradient import Identity, Implicit, OptimizerPreconditioner
from mlotool.program import Program, Schedule
from tests import programs
from tests.hypergradient.two_levels import two_levels

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}


def program(optimizer: Any, hypergradient: Any, clip: float | None = None) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    batch = programs.matrix(3)

    def fit(_: Any, *, w: Any, u: Any) -> Tensor:
        return ((w(batch).squeeze(-1) - u()) ** 2).mean() + 0.5 * sum((each**2).sum() for each in w.parameters())

    upper = programs.Point(programs.vector(1)), lambda _, *, w: (w(batch) ** 2).sum()
    settings = {"optimizer": optimizer, "gradient_clip_norm": clip}
    of_upper = {"optimizer": partial(torch.optim.SGD, lr=1e-3)}
    return two_levels((net, fit), upper, hypergradient, of_upper=of_upper, **settings)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def stepped(made: Program, gradient: Tensor) -> Tensor:
    """Return the parameters after a step of a copy of torch's own optimizer."""
    lower = copy.deepcopy(made.problems["w"])
    parts = gradient.split([each.numel() for each in lower.theta.values()])
    lower.step([part.view_as(each) for part, each in zip(parts, lower.theta.values(), strict=True)])
    return flat(lower.constants().values())


@pytest.mark.parametrize("product", ["reverse", "finite_difference"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_hypergradient_is_that_of_the_optimizers_jacobian(name: str, clip: float | None, product: Any) -> None:
    made = program(OPTIMIZERS[name], Implicit(OptimizerPreconditioner(), product), clip)
    schedule = Schedule(made)
    for _ in range(3):
        schedule.tick()
    lower, upper = made.problems["w"], made.problems["u"]
    theta = list(lower.theta.values())
    loss = lambda u: lower.loss(None, w=Role(lower.module), u=lambda: u)  # noqa: E731
    point = upper.theta["x"].detach().requires_grad_()
    slope = torch.autograd.grad(loss(point), theta, create_graph=True)
    g = flat(slope).detach()
    rows = []
    for number in range(len(g)):
        move = torch.zeros_like(g)
        move[number] = 1e-6
        rows.append((stepped(made, g - move) - stepped(made, g + move)) / 2e-6)
    jacobian = torch.stack(rows, 1)
    upper_slope = flat(torch.autograd.grad(upper.loss(None, w=Role(lower.module)), theta))
    expected = -torch.autograd.grad(flat(slope), point, jacobian.T @ upper_slope)[0]
    found = made.gradient("u")["x"]
    assert float((found - expected).norm() / expected.norm()) < 1e-5


class Role:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, batch: Tensor) -> Tensor:
        return self.module(batch)

    def parameters(self) -> Any:
        return self.module.parameters()


def test_with_plain_sgd_it_is_the_identity_times_the_learning_rate() -> None:
    optimizer = OPTIMIZERS["sgd"]
    found = program(optimizer, Implicit(OptimizerPreconditioner())).gradient("u")["x"]
    expected = program(optimizer, Implicit(Identity(0.1))).gradient("u")["x"]
    assert torch.allclose(found, expected, rtol=1e-12)
