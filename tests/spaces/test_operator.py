"""Operators: padding of another kernel, one decision for tied places, what a forward reads of a layer."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.config.instantiate import node_factory
from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Operator, SharedSpace, Space


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight)


class OtherWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (nn.Identity, r"node 'layer\.weight' reads a tensor that is not there any more"),
        (OtherWeight, r"the model returns \(b, 7\), but without mutators \(b, 4\)"),
    ],
)
def test_a_candidate_without_the_parameter_that_is_read_is_infeasible(candidate: Any, words: str) -> None:
    with pytest.raises(InfeasibleModelError, match=words):
        Space(Tied, [Operator("kind", "layer", {"other": candidate})], inputs=[4])


def base() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()) for _ in range(3)))


MANY = partial(Operator, "act", candidates={"same": None, "gelu": nn.GELU})


def kinds(space: nn.Module, name: int) -> list[str]:
    return [type(block[name]).__name__ for block in space.children()]  # type: ignore[index]


@pytest.mark.parametrize("shared", [False, True])
def test_equal_places_of_blocks_have_one_decision(shared: bool) -> None:
    space = Space(base, [MANY(at="*.[12]", tied="*")], inputs=[2], shared=shared)
    assert isinstance(space, SharedSpace) is shared
    names = [each.name for each in space.table] if shared else list(space.decisions)  # type: ignore[union-attr]
    assert names == ["act_0", "act_1"]
    if not shared:
        space = Space(base, [MANY(at="*.[12]", tied="*")], inputs=[2], decisions={"act_1": "gelu"})
        assert (kinds(space, 1), kinds(space, 2)) == (["ReLU"] * 3, ["GELU"] * 3)


@pytest.mark.parametrize(
    ("before", "candidate", "padding"),
    [
        ({"kernel_size": 3, "padding": 1}, {"kernel_size": 1}, 0),
        ({"kernel_size": 3, "padding": 1, "stride": 2}, {"kernel_size": 5}, 2),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, {"kernel_size": 5, "dilation": 1}, 2),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, {"kernel_size": 5}, 4),
        ({"kernel_size": 3, "padding": 1}, {"kernel_size": 5, "padding": 0}, 0),
        ({"kernel_size": 3, "padding": 1}, {"bias": False}, 1),
        ({"kernel_size": 3, "padding": 1}, {"dilation": 2}, 2),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, {"dilation": 1}, 1),
        ({"kernel_size": 5, "padding": 1}, {"kernel_size": 5}, 1),
    ],
    ids=str,
)
def test_another_kernel_keeps_the_size(before: dict[str, int], candidate: dict[str, int], padding: int) -> None:
    module = nn.Conv2d(8, 2, **before)  # type: ignore[arg-type]
    assert replaced(module, partial(nn.Conv2d, **candidate)).padding == (padding, padding)


def replaced(before: nn.Module, other: Any) -> nn.Module:
    base = partial(nn.Sequential, before, nn.AdaptiveAvgPool2d(1))
    return Space(base, [Operator("kernel", "0", {"other": other})], inputs=[8, 8, 8]).get_submodule("0")


def of_a_recipe(**settings: Any) -> Any:
    return node_factory("candidates.other", {"_target_": "torch.nn.Conv2d", **settings})


@pytest.mark.parametrize(
    "other",
    [
        *(partial(nn.Conv2d, 8, 8, 5), partial(nn.Conv2d, 8, kernel_size=5), partial(nn.Conv2d, 8, 8, (5, 5), 1)),
        *(of_a_recipe(kernel_size=5), of_a_recipe(dilation=2), of_a_recipe(kernel_size=[5, 5])),
    ],
)
def test_a_kernel_by_position_or_of_a_recipe_is_one(other: Any) -> None:
    assert replaced(nn.Conv2d(8, 8, 3, padding=1), other).padding == (2, 2)
    by_position = partial(nn.Conv2d, 8, 8, 5, 1, 0)
    assert replaced(nn.Conv2d(8, 8, 3, padding=1), by_position).padding == (0, 0), "one that is given stays"


def test_a_pooling_has_no_dilation_of_the_convolution_before() -> None:
    dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
    assert replaced(dilated, partial(nn.AvgPool2d, 5)).padding == (2, 2)
    assert replaced(dilated, nn.AvgPool2d).padding == (1, 1)
    assert replaced(nn.MaxPool2d(3, 1, 1), partial(nn.MaxPool2d, 5)).padding == 2
    assert replaced(nn.MaxPool2d(3, 1, 1), partial(nn.MaxPool2d, (3, 5))).padding == (1, 2)
