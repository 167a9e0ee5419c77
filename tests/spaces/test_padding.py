"""A candidate with another kernel gets the padding that keeps the size of images."""

from functools import partial
from typing import Any

import pytest
from torch import nn

from mlotool.config.instantiate import NodeFactory
from mlotool.spaces import Operator, Space


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
    base = partial(nn.Sequential, nn.Conv2d(1, 2, **before), nn.AdaptiveAvgPool2d(1))  # type: ignore[arg-type]
    other = partial(nn.Conv2d, **candidate)
    space = Space(base, [Operator("kernel", "0", {"other": other})], inputs=[1, 8, 8])
    assert space.get_submodule("0").padding == (padding, padding)


def replaced(before: nn.Module, other: Any) -> nn.Module:
    base = partial(nn.Sequential, before, nn.AdaptiveAvgPool2d(1))
    return Space(base, [Operator("kernel", "0", {"other": other})], inputs=[8, 8, 8]).get_submodule("0")


@pytest.mark.parametrize(
    "other", [partial(nn.Conv2d, 8, 8, 5), partial(nn.Conv2d, 8, kernel_size=5), partial(nn.Conv2d, 8, 8, (5, 5), 1)]
)
def test_a_kernel_by_position_is_one(other: Any) -> None:
    assert replaced(nn.Conv2d(8, 8, 3, padding=1), other).padding == (2, 2)


def test_a_padding_by_position_stays() -> None:
    assert replaced(nn.Conv2d(8, 8, 3, padding=1), partial(nn.Conv2d, 8, 8, 5, 1, 0)).padding == (0, 0)


def test_a_pooling_has_no_dilation_of_the_convolution_before() -> None:
    dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
    assert replaced(dilated, partial(nn.AvgPool2d, 5)).padding == (2, 2)
    assert replaced(dilated, nn.AvgPool2d).padding == (1, 1)


def test_a_single_number_stays_one() -> None:
    assert replaced(nn.MaxPool2d(3, 1, 1), partial(nn.MaxPool2d, 5)).padding == 2
    assert replaced(nn.MaxPool2d(3, 1, 1), partial(nn.MaxPool2d, (3, 5))).padding == (1, 2)


@pytest.mark.parametrize("settings", [{"kernel_size": 5}, {"dilation": 2}, {"kernel_size": [5, 5]}], ids=str)
def test_a_candidate_of_a_recipe_is_fitted_too(settings: dict[str, Any]) -> None:
    other = NodeFactory("candidates.other", {"_target_": "torch.nn.Conv2d", **settings})
    assert replaced(nn.Conv2d(8, 8, 3, padding=1), other).padding == (2, 2)
