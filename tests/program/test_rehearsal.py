"""The evaluation of a loss before the first tick."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlotool import (
    EvolutionStrategies,
    FirstOrder,
    Graph,
    Identity,
    Implicit,
    Penalty,
    Problem,
    Program,
    Unrolled,
    remat,
)
from mlotool.core.user_code import WrongResultError

BATCH = torch.ones(3, 2)
ELSEWHERE = [Unrolled(), Unrolled(remat=False), Implicit(Identity(), "finite_difference")]


class Net(nn.Module):
    """Two layers, of which one is evaluated again in the backward pass."""

    def __init__(self, again: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(2, 4), nn.Tanh()), nn.Linear(4, 1)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.first, x).square())


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x, use_reentrant=False)
    return found


def of_net(again: Any, hypergradient: Any) -> Program:
    lower = Problem(
        "w",
        Net(again),
        lambda batch, *, w, x: (x(w(batch)) ** 2).mean(),
        roles={"w": "w", "x": "x"},
        hypergradient=hypergradient,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    upper = Problem("x", nn.Linear(1, 1), lambda batch, *, w: w(batch).square().mean(), roles={"w": "w"})
    return Program([lower, upper], Graph({"x": ["w"]}, {"w": ["x"]}))


def of_smoothed(hypergradient: Any) -> Program:
    """A loss that torch takes as long as what shapes it has no gradient."""

    def smoothed(batch: Tensor, *, w: Any, x: Any) -> Tensor:
        target = torch.zeros(len(batch), dtype=torch.long)
        return nn.functional.cross_entropy(w(batch), target, label_smoothing=x(torch.ones(1)).sigmoid().squeeze())

    lower = Problem(
        "w",
        nn.Linear(2, 3),
        smoothed,
        roles={"w": "w", "x": "x"},
        hypergradient=hypergradient,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    upper = Problem("x", nn.Linear(1, 1), lambda batch, *, w: w(batch).square().mean(), roles={"w": "w"})
    return Program([lower, upper], Graph({"x": ["w"]}, {"w": ["x"]}))


@pytest.mark.filterwarnings("ignore:.*Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("hypergradient", [*ELSEWHERE, Penalty(multiplier=1.0)])
def test_a_loss_that_takes_no_gradient_of_what_shapes_it_is_refused(hypergradient: Any) -> None:
    with pytest.raises(TypeError, match="label_smoothing"):
        of_smoothed(hypergradient).rehearse("w", BATCH)


@pytest.mark.parametrize("hypergradient", [FirstOrder(), EvolutionStrategies()])
def test_it_does_where_no_gradient_of_it_is_taken(hypergradient: Any) -> None:
    assert of_smoothed(hypergradient).rehearse("w", BATCH).loss.isfinite()


def test_a_frozen_parameter_was_there_before() -> None:
    layer = torch.nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    problem = Problem("w", layer, lambda batch, *, w: w(batch).square().mean(), roles={"w": "w"})
    loss = Program([problem], Graph()).rehearse("w", torch.ones(3, 2)).loss
    assert loss.requires_grad
    assert not layer.bias.requires_grad


@pytest.mark.parametrize("hypergradient", ELSEWHERE)
def test_a_checkpoint_of_torch_is_refused_where_gradients_are_taken_at_other_parameters(hypergradient: Any) -> None:
    with pytest.raises(WrongResultError) as error:
        of_net(checkpointed, hypergradient).rehearse("w", BATCH)
    assert "looks the module's parameters up again" in error.value.found
    assert "mlotool.remat" in error.value.advice


def test_a_checkpoint_of_torch_is_right_at_the_parameters_of_the_module() -> None:
    assert of_net(checkpointed, Implicit(Identity())).rehearse("w", BATCH).loss.requires_grad


@pytest.mark.parametrize("hypergradient", ELSEWHERE)
def test_blocks_that_are_evaluated_again_with_their_parameters_go_everywhere(hypergradient: Any) -> None:
    program = of_net(remat, hypergradient)
    before = [each.clone() for problem in program.problems.values() for each in problem.theta.values()]
    assert program.rehearse("w", BATCH).loss.requires_grad
    after = [each for problem in program.problems.values() for each in problem.theta.values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
