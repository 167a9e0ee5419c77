"""What mutators put into a block is repeated with it, and copies are what the block is."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.spaces import AbstractMutator, Branch, Cell, Insert, Operator, Repeat, Space, Split


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return F.dropout(h * torch.sigmoid(self.gate(h)), 0.5, self.training)


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def test_a_block_that_stretches_is_repeated() -> None:
    space = Space(lambda: Net(Gate()), [Repeat("depth", "block", [3])], inputs=[4]).eval()
    x = torch.randn(2, 4)
    expected = x
    for path in ("block", "depth_0_1.block", "depth_0_2.block"):
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


def plain() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 2))


def repeated(base: object, mutators: list[AbstractMutator], times: int = 2) -> Space:
    return Space(base, [*mutators, Repeat("more", "1", [times])], inputs=[4], seed=1)  # type: ignore[arg-type]


def test_an_insertion_is_repeated_with_its_block() -> None:
    space = repeated(residual, [Insert("norm", "1.a", {"norm": partial(nn.Linear, bias=False)})]).eval()
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
@pytest.mark.parametrize("base", [residual, plain])
def test_a_block_is_repeated_whole(base: object, mutator: str) -> None:
    if base is plain and mutator == "operator":
        changed: AbstractMutator = Operator("new", "1.1", {"new": nn.Tanh})
    else:
        changed = MUTATORS[mutator]
    once, twice, thrice = (repeated(base, [changed], times) for times in (1, 2, 3))
    parameters = [sum(each.numel() for each in space.parameters()) for space in (once, twice, thrice)]
    outside = sum(each.numel() for path in "02" for each in once.get_submodule(path).parameters())
    block = parameters[0] - outside
    assert parameters == [outside + times * block for times in (1, 2, 3)]
    nodes = [len(space.nodes) for space in (once, twice, thrice)]
    assert nodes == [4 + times * (nodes[0] - 4) for times in (1, 2, 3)]
    assert thrice(torch.randn(3, 4)).shape == (3, 2)
