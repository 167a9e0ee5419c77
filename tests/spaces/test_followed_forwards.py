"""What a graph would lose of a model's forward is refused, and what would make its nodes lie is mended."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Branch, Input, Insert, Operator, Space

CANDIDATES: dict[str, Any] = {"relu": None, "tanh": nn.Tanh}
ACTIVATION = Operator("activation", {"type": "ReLU"}, CANDIDATES)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.step = 0
        self.seen: Any = []
        self.tables: dict[str, Tensor] = {}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.relu(self.second(self.relu(self.first(x))))


def net(forward: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    """Return what makes a `Net` with another forward."""
    return type("Net", (Net,), {"forward": forward})


def frozen(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = self.first(x)
    return self.second(x)


def layer_drop(self: Any, x: Tensor) -> Tensor:
    return x if self.training and torch.rand(1).item() < 1e-9 else self.first(x)


def counting(self: Any, x: Tensor) -> Tensor:
    self.step += 1
    return self.first(x) * min(1.0, self.step / 100)


def recording(self: Any, x: Tensor) -> Tensor:
    self.seen.append(self.first(x))
    return self.seen[-1]


def keeping(self: Any, x: Tensor) -> Tensor:
    self.last = self.first(x)
    return self.last


def constant(self: Any, x: Tensor) -> Tensor:
    return self.first(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def other_in_training(self: Any, x: Tensor) -> Tensor:
    return self.first(x) if self.training else self.second(x)


def adding(self: Any, x: Tensor) -> Tensor:
    h = x * 1
    k = h
    h += 1
    return k + h


def deciding(self: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return self.first(x)
    return x * 1


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (frozen, "takes steps under torch.no_grad(), enable_grad() or autocast"),
        (layer_drop, "draws random numbers, which its graph would keep as constants"),
        (counting, "sets its own attribute 'step' in forward"),
        (recording, "sets its own attribute 'seen' in forward"),
        (keeping, "sets its own attribute 'last' in forward"),
        (constant, "makes a tensor of constants in forward"),
        (other_in_training, "computes something else than its graph"),
        (adding, "computes something else than its graph"),
        (deciding, "test_followed_forwards.py, line"),
    ],
)
def test_what_a_graph_would_lose_is_refused(forward: Callable[[Any, Tensor], Any], words: str) -> None:
    base = net(forward)
    with pytest.raises(ConfigError) as found:
        Space(base, inputs=[4])
    assert words in str(found.value)
    assert "leaves: ['.']" in str(found.value)
    assert Space(lambda: nn.Sequential(base()), inputs=[4], leaves=["0"])(torch.ones(2, 4)).shape == (2, 4)


def counted(self: Any, x: Tensor) -> Any:
    self.calls.add_(1)
    return Net.forward(self, x)


def test_building_a_space_moves_no_buffer() -> None:
    space = Space(net(counted), [ACTIVATION], inputs=[4])
    assert space.calls == 0
    space(torch.ones(2, 4))
    assert space.calls == 1


def test_each_call_of_a_layer_is_a_place_of_its_own() -> None:
    space = Space(Net, [ACTIVATION], inputs=[4], decisions={"activation_1": "tanh"})
    x = torch.randn(3, 4)
    assert torch.equal(space(x), torch.tanh(space.second(torch.relu(space.first(x)))))


def in_place() -> nn.Module:
    linears = [nn.Linear(4, 4) for _ in range(3)]
    return nn.Sequential(linears[0], nn.ReLU(inplace=True), linears[1], nn.ReLU(inplace=True), linears[2])


def test_layers_in_place_return_new_tensors_where_mutators_read_their_operands() -> None:
    skip, x = Input("skip", "4", {"type": "Linear"}), torch.randn(3, 4)
    space = Space(in_place, [skip], inputs=[4], decisions={"skip_0": 1})
    first, second, third = (space.get_submodule(path) for path in ("0", "2", "4"))
    assert torch.equal(space(x), third(second(torch.relu(first(x)))))
    branch = Branch("branch", "1", {"none": None, "linear": nn.Linear})
    space = Space(in_place, [branch], inputs=[4], decisions={"branch_0": "linear"})
    space(x).sum().backward()
    assert all(parameter.grad is not None for parameter in space.parameters())


def unused_result(self: Any, x: Tensor) -> Any:
    x = self.first(x)
    F.relu(x, inplace=True)
    return self.second(x)


def of_a_view(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(torch.flatten(self.first(x), 1), inplace=True))


@pytest.mark.parametrize("forward", [unused_result, of_a_view])
def test_a_function_in_place_is_replaced(forward: Callable[[Any, Tensor], Any]) -> None:
    operator, x = Operator("activation", {"type": "relu"}, CANDIDATES), torch.randn(3, 4)
    for name, function in (("relu", torch.relu), ("tanh", torch.tanh)):
        space = Space(net(forward), [operator], inputs=[4], decisions={"activation_0": name})
        assert torch.equal(space(x), space.second(function(space.first(x))))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.relu_(),
        lambda h: h.view(-1, 4).relu_(),
        lambda h: F.relu(h[:, :2], inplace=True),
        lambda h: F.relu(h.detach(), inplace=True),
    ],
)
def test_what_is_changed_in_place_and_read_afterwards_is_refused_where_mutators_come(change: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        change(h)
        return self.second(h)

    def base() -> nn.Module:
        return nn.Sequential(net(forward)())

    insert, x = Insert("new", "0", {"none": None, "tanh": nn.Tanh}), torch.randn(3, 4)
    torch.manual_seed(0)
    expected = base()(x)
    torch.manual_seed(0)
    assert torch.equal(Space(base, inputs=[4])(x), expected)
    with pytest.raises(ConfigError, match=r"leaves: (node '0:relu_' changes in place|the forward of .* its graph)"):
        Space(base, [insert], inputs=[4])
    assert Space(base, [insert], inputs=[4], leaves=["0"], decisions={"new_0": "tanh"})(x).shape == (3, 4)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.tables: dict[int, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.sum() < 0:
            self.table = torch.arange(4.0)
        self.tables.setdefault(4, []).append(self.table)
        return x * self.tables[4][0]


@pytest.mark.parametrize("leaf", ["0", "."])
def test_a_table_that_a_first_call_makes_is_made_anew(leaf: str) -> None:
    base = partial(lambda: nn.Sequential(Table(), nn.Linear(4, 4)))
    space = Space(base, [Insert("new", "0" if leaf == "0" else "base", {"tanh": nn.Tanh})], inputs=[4], leaves=[leaf])
    table = space.get_submodule("0" if leaf == "0" else "base.0")
    assert isinstance(table, Table) and table.table is None and not table.tables
    x, last = torch.randn(3, 4), space.get_submodule("1" if leaf == "0" else "base.1")
    scaled = x * torch.arange(4.0)
    assert torch.equal(space(x), last(scaled.tanh()) if leaf == "0" else last(scaled).tanh())
