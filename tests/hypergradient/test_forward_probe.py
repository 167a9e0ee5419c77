"""The comparison of forward products with double backward, where several ranks have a part of the batch each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.products.forward import check_forward_product, chosen_product
from mlotool.problem.interface import LowerView, Vector
from mlotool.problem.rank_mean import RankMean
from tests.hypergradient.test_forward import Doubled, quadratic, view_of


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
    with pytest.raises(ConfigError, match=r"found forward|found what torch cannot differentiate .*autograd\.Function"):
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
