"""The comparison of forward products with double backward, where several ranks have a part of the batch each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.product_choice import check_forward_product, chosen_product
from mlotool.hypergradient.products import ForwardProduct
from mlotool.problem.interface import LowerProblem, LowerView, Vector
from mlotool.problem.rank_mean import RankMean
from tests.hypergradient.test_forward import Doubled, quadratic, view_of
from tests.live_storage import LiveStorage


class OldStyle(torch.autograd.Function):
    """Has no derivative in forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * cotangent


LOSSES = {
    "another derivative": lambda theta, inputs: quadratic(theta, inputs) + (Doubled.apply(theta[0]) ** 2).sum(),
    "no derivative": lambda theta, inputs: quadratic(theta, inputs) + OldStyle.apply(theta[0]).sum(),
}


class Pair:
    """This rank's side of two; the other one sends what it is told to, or what this one does.

    Args:
        other: flags of the other rank: it has failed, it lacks memory, a parameter has no gradient.
    """

    def __init__(self, other: list[float] | None = None) -> None:
        self.sent: list[list[float]] = []
        self._other = other

    def of(self, view: LowerView) -> LowerView:
        mean = RankMean(self._exchange)
        return replace(view, problem=replace(view.problem, rank_mean=mean, has_blocks=True))

    def _exchange(self, vector: Vector) -> list[Tensor]:
        [flags] = vector
        self.sent.append(flags.tolist())
        return [flags if self._other is None else (flags + torch.tensor(self._other)) / 2]


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_that_finds_a_difference_tells_the_others_before_it_stops(name: str) -> None:
    pair = Pair([0.0, 0.0, 0.0])
    view, theta, inputs = view_of(LOSSES[name])
    with pytest.raises(ConfigError, match=r"found forward|found an autograd\.Function"):
        check_forward_product(pair.of(view), theta, inputs, (True,))
    assert [each[0] for each in pair.sent] == [1.0]


def test_a_rank_stops_where_another_one_has_found_a_difference() -> None:
    view, theta, inputs = view_of(quadratic)
    with pytest.raises(ConfigError, match="another rank has found to fail"):
        check_forward_product(Pair([1.0, 0.0, 0.0]).of(view), theta, inputs, (True,))


@pytest.mark.parametrize(("name", "other"), [("another derivative", 0.0), (None, 1.0)])
def test_all_fall_back_with_auto(name: str | None, other: float) -> None:
    view, theta, inputs = view_of(quadratic if name is None else LOSSES[name])
    there = Pair([other, 0.0, 0.0]).of(view)
    assert chosen_product("auto", there, theta, inputs, (True,)) == "reverse"
    assert there.problem.traits.lacks_tangents


@pytest.mark.parametrize(
    ("other", "is_done"), [([0.0, 0.0, 0.0], True), ([0.0, 0.0, 1.0], False), ([0.0, 1.0, 1.0], True)]
)
def test_ranks_compare_again_alike(other: list[float], is_done: bool) -> None:
    """Another comparison has exchanges, of which none may be left out on one rank."""
    view, theta, inputs = view_of(quadratic)
    check_forward_product(Pair(other).of(view), theta, inputs, (True,))
    assert view.problem.traits.has_compared_forward is is_done


def test_the_comparison_takes_little_more_memory_than_a_product() -> None:
    weights = [torch.eye(8, dtype=torch.float64) / 2 for _ in range(12)]

    def loss(theta: Vector, inputs: Vector) -> Tensor:
        x = torch.ones(64, 8, dtype=torch.float64) * inputs[0].sum()
        for weight in theta:
            x = torch.softmax(x @ weight, dim=1)
        return x.square().sum()

    inputs, peaks = [torch.ones(2, dtype=torch.float64)], []
    view = LowerView(LowerProblem("w"), tuple(weights), loss)
    for take in (
        lambda: check_forward_product(view, weights, inputs, (True,)),
        lambda: ForwardProduct(view, weights, inputs, [True]).pull(weights),
    ):
        take()
        view.problem.traits.has_compared_forward = False
        with LiveStorage() as live:
            take()
        peaks.append(live.peak)
    assert peaks[0] < 1.4 * peaks[1]
