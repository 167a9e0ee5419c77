"""What a graph would lose of a model's forward is refused, and what would make its nodes lie is mended."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Branch, Input, Operator, Repeat, Space

ACTIVATION = {"type": "ReLU"}
CANDIDATES: dict[str, Any] = {"relu": None, "tanh": nn.Tanh}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.first(x))))


class Frozen(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


class MixedPrecision(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.first(x)


class LayerDrop(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 1e-9:
            return x
        return self.first(x)


class PythonDrop(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 1e-9:
            return x
        return self.first(x)


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.first(x) * min(1.0, self.step / 100)


class Recording(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.first(x))
        return self.seen[-1]


class Caching(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["first"] = self.first(x)
        return self.seen["first"]


class Constant(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class KeepsMode(Net):
    def train(self, mode: bool = True) -> "KeepsMode":
        super().train(mode)
        self.second.eval()
        return self


class OwnNodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        return self.nodes[0](x)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (Frozen, "takes steps under torch.no_grad(), enable_grad() or autocast"),
        (MixedPrecision, "takes steps under torch.no_grad(), enable_grad() or autocast"),
        (LayerDrop, "draws random numbers that a graph would draw once and for all"),
        (PythonDrop, "draws random numbers that a graph would draw once and for all"),
        (Counting, "sets its own attribute 'step' in forward"),
        (Recording, "sets its own attribute 'seen' in forward"),
        (Caching, "sets its own attribute 'seen' in forward"),
        (Constant, "makes a tensor of constants in forward"),
        (KeepsMode, "found KeepsMode.train, which a space has from torch.nn.Module"),
        (OwnNodes, "with an attribute 'nodes', which a space has for itself"),
    ],
)
def test_what_a_graph_would_lose_is_refused(base: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        Space(base, inputs=[4])
    assert words in str(found.value)
    assert "leaves: ['.']" in str(found.value)
    assert Space(base, inputs=[4], leaves=["."])(torch.ones(2, 4)).shape == (2, 4)


class CountingBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        return super().forward(x)


def test_building_a_space_moves_no_buffer() -> None:
    operator = Operator("activation", ACTIVATION, CANDIDATES)
    space = Space(CountingBuffer, [operator], inputs=[4])
    assert space.seen == 0
    space(torch.ones(2, 4))
    assert space.seen == 1


def test_each_call_of_a_layer_is_a_place_of_its_own() -> None:
    operator = Operator("activation", ACTIVATION, CANDIDATES)
    space = Space(Net, [operator], inputs=[4], decisions={"activation_1": "tanh"})
    first, second = space.get_submodule("first"), space.get_submodule("second")
    x = torch.randn(3, 4)
    assert torch.equal(space(x), torch.tanh(second(torch.relu(first(x)))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        return self.block(self.block(x))


def test_two_calls_of_a_module_are_not_one_place() -> None:
    with pytest.raises(ConfigError, match="found no place for path 'block'"):
        Space(CalledTwice, [Operator("block", "block", {"linear": nn.Linear})], inputs=[4])


class SharedTensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.second(self.first(x)), self.first.weight)


def test_a_layer_that_is_left_out_keeps_a_tensor_that_is_read_elsewhere() -> None:
    space = Space(SharedTensor, [Repeat("first", "first", [0])], inputs=[4])
    x = torch.randn(2, 4)
    weight = space.get_submodule("first").weight
    assert torch.equal(space(x), F.linear(space.get_submodule("second")(x), weight))  # type: ignore[arg-type]


def in_place() -> nn.Module:
    linears = [nn.Linear(4, 4) for _ in range(3)]
    return nn.Sequential(linears[0], nn.ReLU(inplace=True), linears[1], nn.ReLU(inplace=True), linears[2])


def test_a_node_that_is_read_is_not_changed_in_place_before() -> None:
    skip = Input("skip", "4", {"type": "Linear"})
    space = Space(in_place, [skip], inputs=[4], decisions={"skip_0": 1})
    first, second, third = (space.get_submodule(path) for path in ("0", "2", "4"))
    x = torch.randn(3, 4)
    assert torch.equal(space(x), third(second(torch.relu(first(x)))))


def test_a_branch_beside_an_in_place_layer_can_be_trained() -> None:
    branch = Branch("branch", "1", {"none": None, "linear": nn.Linear})
    space = Space(in_place, [branch], inputs=[4], decisions={"branch_0": "linear"})
    space(torch.randn(3, 4)).sum().backward()
    assert all(each.grad is not None for each in space.parameters())


class ResultUnused(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        F.relu(x, inplace=True)
        return self.second(x)


def test_an_operation_of_which_only_the_effect_counts_is_replaced() -> None:
    operator = Operator("activation", {"type": "relu"}, CANDIDATES)
    x = torch.randn(3, 4)
    for name, function in (("relu", torch.relu), ("tanh", torch.tanh)):
        space = Space(ResultUnused, [operator], inputs=[4], decisions={"activation_0": name})
        first, second = space.get_submodule("first"), space.get_submodule("second")
        assert torch.equal(space(x), second(function(first(x))))


class Adding(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        first.add_(x)
        return self.relu(second + first)


def test_what_is_changed_in_place_is_no_source() -> None:
    space = Space(Adding, [Input("skip", "relu", {"type": "Linear"})], inputs=[4], decisions={"skip_0": 1})
    assert [each.inputs for each in space.nodes if each.id == "relu"] == [("second",)]
    assert len(space.decisions["skip_0"].candidates) == 2


def test_inputs_have_torchs_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        space = Space(Net, [Operator("activation", ACTIVATION, CANDIDATES)], inputs=[4])
        assert space(torch.ones(1, 4)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_leaves_are_a_list() -> None:
    with pytest.raises(
        ConfigError, match=r"leaves: found 'first'; expected a list of paths\. Write leaves: \['first'\]"
    ):
        Space(Net, inputs=[4], leaves="first")


def test_texts_make_no_modules() -> None:
    text: Any = "torch.nn.Linear"
    with pytest.raises(ConfigError, match=r"base: found 'torch.nn.Linear'; expected what makes a module"):
        Space(text, inputs=[4])
    with pytest.raises(ConfigError, match=r"Operator: found candidates=.*torch.nn.Linear.*; expected"):
        Space(Net, [Operator("layer", "first", {"linear": text})], inputs=[4])
