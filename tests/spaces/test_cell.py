"""Cells: what decisions make of them, and what they compute."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.models import TwoBackNetwork, operation, pointwise
from mlotool.spaces import Cell, Space

OPERATIONS = {
    "separable": partial(operation, "sep_conv_3x3", affine=True),
    "max": partial(operation, "max_pool_3x3", affine=True),
    "skip": partial(operation, "skip_connect", affine=True),
}


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def of_vectors(decisions: Mapping[str, Any], **settings: Any) -> Space:
    torch.manual_seed(0)
    cell = Cell("cell", "1", {"linear": nn.Linear, "same": None, "tanh": nn.Tanh}, num_nodes=2, **settings)
    return Space(chain, [cell], inputs=[4], decisions=decisions, seed=3)


def of_images(decisions: Mapping[str, Any], at: str = "blocks.[012]", **settings: Any) -> Space:
    torch.manual_seed(0)
    project = partial(pointwise, affine=True)
    cell = Cell("cell", at, OPERATIONS, num_nodes=2, project=project, **settings)
    return Space(lambda: TwoBackNetwork([1, 8, 8], 10, width=4), [cell], inputs=[1, 8, 8], decisions=decisions, seed=3)


def test_first_candidates_read_what_the_place_reads() -> None:
    space = of_vectors({}, num_inputs=1, end="sum")
    assert {name: each.value for name, each in space.decisions.items()} == {
        "cell_0_0_input_a": 0,
        "cell_0_0_operation_a": "linear",
        "cell_0_1_input_a": 0,
        "cell_0_1_operation_a": "linear",
    }
    assert space.decisions["cell_0_1_input_a"].candidates == (0, 1)
    inputs = {each.id: each.inputs for each in space.nodes}
    assert inputs["cell_0_0_a"] == inputs["cell_0_1_a"] == ("0",)
    assert inputs["cell_0_end"] == ("cell_0_0_a", "cell_0_1_a")
    assert inputs["2"] == ("cell_0_end",)


@pytest.mark.parametrize("join", ["sum", "mean", "concat"])
@pytest.mark.parametrize("end", ["sum", "mean", "concat"])
def test_it_computes_what_torch_computes(join: str, end: str) -> None:
    decisions = {
        "cell_0_0_operation_b": "tanh",
        "cell_0_1_input_a": 0,
        "cell_0_1_operation_a": "same" if join != "concat" else "tanh",
        "cell_0_1_input_b": 0,
    }
    found = of_vectors(decisions, join=join, end=end, project=nn.Linear)
    x = torch.randn(5, 4)

    def both(parts: list[Tensor], how: str) -> Tensor:
        return torch.cat(parts, 1) if how == "concat" else sum(parts, torch.zeros(())) / (2 if how == "mean" else 1)

    layers = dict(found.named_modules())
    h = layers["0"](x)
    first = both([layers["cell_0_0_a"](h), torch.tanh(h)], join)
    second = both([h if join != "concat" else torch.tanh(h), layers["cell_0_1_b"](h)], join)
    expected = layers["2"](layers["cell_0_project"](both([first, second], end)))
    assert torch.allclose(found(x), expected, rtol=1e-6, atol=1e-7)


def test_nodes_that_others_read_are_no_ends() -> None:
    space = of_vectors({"cell_0_1_input_a": 1}, num_inputs=1, end="sum")
    x = torch.randn(5, 4)
    layers = dict(space.named_modules())
    expected = layers["2"](layers["cell_0_1_a"](layers["cell_0_0_a"](layers["0"](x))))
    assert torch.equal(space(x), expected)
    assert "cell_0_end" not in {each.id for each in space.nodes}


def test_cells_fit_places_that_halve_the_image() -> None:
    space = of_images({"cell_1_0_operation_b": "skip", "cell_1_1_input_a": 2})
    assert space(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    shapes = {each.id: each.shape for each in space.nodes}
    assert shapes["cell_0_project"] == (4, 8, 8)
    assert shapes["cell_1_0_b"] == shapes["cell_1_1_a"] == shapes["cell_1_project"] == (8, 4, 4)
    # The first convolution of an operation has its stride: 2 from an input, 1 from a node of the cell.
    assert space.get_submodule("cell_1_0_a.1").stride == (2, 2)
    assert space.get_submodule("cell_1_1_a.1").stride == (1, 1)


def test_tied_places_have_one_cell_with_parameters_of_their_own() -> None:
    space = of_images({"cell_1_operation_a": "max"}, at="blocks.[02]", tied=True)
    assert list(space.decisions)[:2] == ["cell_0_input_a", "cell_0_operation_a"]
    assert len(space.decisions) == 8
    kinds = {each.id: each.kind for each in space.nodes}
    assert kinds["cell_0_1_a"] == kinds["cell_1_1_a"] == "MaxPool2d"
    one, other = (space.get_submodule(f"cell_{place}_0_a.1") for place in (0, 1))
    assert one.weight.shape != other.weight.shape
