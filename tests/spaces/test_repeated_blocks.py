"""What mutators put into a block is repeated with it, copies are what the block is, and shapes are present ones."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.spaces import AbstractMutator, Branch, Cell, Grow, Insert, ModelGraph, Operator, Repeat, Space, Split


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return F.dropout(h * torch.sigmoid(self.gate(h)), 0.5, self.training)


def test_a_block_that_stretches_is_repeated() -> None:
    space = Space(lambda: nn.Sequential(Gate()), [Repeat("depth", "0", [3])], inputs=[4]).eval()
    x = torch.randn(2, 4)
    expected = x
    for path in ("0", "depth_0_1.0", "depth_0_2.0"):
        h = space.get_submodule(f"{path}.layer")(expected)
        expected = h * torch.sigmoid(space.get_submodule(f"{path}.gate")(h))
    assert torch.equal(space(x), expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)))


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 2))


def repeated(mutators: list[AbstractMutator], times: int = 2) -> Space:
    return Space(residual, [*mutators, Repeat("more", "1", [times])], inputs=[4], seed=1)


def test_an_insertion_is_repeated_with_its_block() -> None:
    space = repeated([Insert("norm", "1.a", {"norm": partial(nn.Linear, bias=False)})]).eval()
    layers, x = dict(space.named_modules()), torch.randn(3, 4)
    expected = layers["0"](x)
    for block, norm in (("1", "norm_0"), ("more_0_1.1", "more_0_1.norm_0")):
        expected = expected + layers[f"{block}.b"](torch.relu(layers[norm](layers[f"{block}.a"](expected))))
    assert torch.equal(space(x), layers["2"](expected))
    assert not torch.equal(space.get_parameter("norm_0.weight"), space.get_parameter("more_0_1.norm_0.weight"))


LINEAR = {"new": nn.Linear}
MUTATORS = {
    "insert": Insert("new", {"path": "1.*", "type": "Linear"}, LINEAR),
    "branch": Branch("new", {"path": "1.*", "type": "Linear"}, LINEAR),
    "split": Split("new", {"path": "1.*", "type": "Linear"}, LINEAR),
    "cell": Cell("new", {"path": "1.*", "type": "Linear"}, LINEAR, num_nodes=2, num_inputs=1, end="sum"),
    "operator": Operator("new", {"path": "1*", "type": "relu"}, {"new": nn.Tanh}),
    "again": Repeat("new", "1.*", [2]),
}


@pytest.mark.parametrize("mutator", MUTATORS)
def test_a_block_is_repeated_whole(mutator: str) -> None:
    once, twice, thrice = (repeated([MUTATORS[mutator]], times) for times in (1, 2, 3))
    parameters = [sum(each.numel() for each in space.parameters()) for space in (once, twice, thrice)]
    outside = sum(each.numel() for path in "02" for each in once.get_submodule(path).parameters())
    block = parameters[0] - outside
    assert parameters == [outside + times * block for times in (1, 2, 3)]
    nodes = [len(space.nodes) for space in (once, twice, thrice)]
    assert nodes == [4 + times * (nodes[0] - 4) for times in (1, 2, 3)]
    assert thrice(torch.randn(3, 4)).shape == (3, 2)


def base() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


OTHERS = {
    "insert": partial(Insert, candidates={"linear": nn.Linear}),
    "branch": partial(Branch, candidates={"linear": nn.Linear}),
    "operator": partial(Operator, candidates={"linear": nn.Linear}),
    "split": partial(Split, candidates={"linear": nn.Linear}),
    "cell": partial(Cell, candidates={"linear": nn.Linear}, num_nodes=1, num_inputs=1, end="sum"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_copy_is_changed_in_the_next_step(other: str) -> None:
    mutators = {"none": None, "again": partial(Repeat, counts=[2]), **OTHERS}
    grow = Grow("grow", {"type": "Linear"}, mutators, steps=2)
    decisions: dict[str, str | int] = {"grow_0": "again", "grow_1": other, "grow_1_place": 1}
    space = Space(base, [grow], inputs=[4], decisions=decisions)
    sizes = [tuple(each.weight.shape) for each in space.modules() if isinstance(each, nn.Linear)]
    num = 3 if other in ("operator", "cell") else 4
    assert sorted(sizes) == [(2, 4)] + (num - 1) * [(4, 4)]
    assert space(torch.randn(3, 4)).shape == (3, 2)


class Wider(AbstractMutator):
    """Widens the first layer, and looks at what stands behind it."""

    name = "wider"

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def mutate(self, graph: ModelGraph) -> None:
        graph.replace(graph.find("0")[0], lambda in_features: nn.Linear(in_features, 12), "wide")
        places = [*graph.find("1"), *graph.find("2")]
        self.shapes.extend((each.input_shape, each.output_shape) for each in places)
        graph.replace(places[1], nn.Linear, "last")


def test_what_stands_behind_a_changed_size_is_found_with_it() -> None:
    mutator = Wider()
    space = Space(base, [mutator], inputs=[4])
    assert mutator.shapes == [((12,), (12,)), ((12,), (2,))]
    assert space.get_parameter("2.weight").shape == (2, 12)
    assert space(torch.randn(3, 4)).shape == (3, 2)
