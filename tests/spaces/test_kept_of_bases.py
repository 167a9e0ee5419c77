"""What a base offers beside its forward: it works in its space and its copies, or is refused by name."""

import copy
import io
import pickle
from functools import partial
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from mlotool.core.errors import ConfigError
from mlotool.spaces import AbstractMutator, Branch, Input, Insert, ModelGraph, Operator, Repeat, Space


class Net(nn.Module):
    act = torch.relu
    kind = nn.ReLU

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(2, 2), 2.0
        self.register_buffer("temperature", torch.tensor(1.0))

    @staticmethod
    def count(*values: Any) -> int:
        return len(values)

    @classmethod
    def called(cls, *values: Any) -> int:
        return len(values)

    @property
    def heat(self) -> Tensor:
        return self.temperature

    @heat.setter
    def heat(self, value: float) -> None:
        self.temperature.fill_(value)

    def above(self) -> str:
        return super().extra_repr()

    def doubled(self, x: Tensor) -> Tensor:
        return self(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rate * self.temperature


SAME = Operator("layer", "layer", {"same": None, "other": nn.Linear})
MORE = Insert("more", "layer", {"relu": nn.ReLU})


@pytest.mark.parametrize("leaves", [(), ("layer",), (".",)])
def test_what_a_class_offers_works_where_its_code_is_the_graph(leaves: tuple[str, ...]) -> None:
    space, x = Space(Net, [] if leaves else [SAME], inputs=[2], leaves=leaves), torch.tensor([[-1.0, 2.0]])
    for copied in (space, copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert (copied.count(1), copied.called(1, 2), copied.above()) == (1, 2, "")
        assert torch.equal(copied.act(x), torch.relu(x)) and isinstance(copied.kind(), nn.ReLU)
        before = copied(x)
        assert torch.equal(copied.doubled(x), 2 * before)
        copied.heat = 3.0
        assert float(copied.heat) == 3.0 and torch.allclose(copied(x), 3 * before)
        assert not hasattr(copied, "nothing")


def test_what_a_class_offers_is_left_out_where_connections_are_others() -> None:
    space = Space(Net, [MORE], inputs=[2])
    assert not hasattr(space, "doubled")


def test_a_number_that_the_graph_has_is_not_changed_in_silence() -> None:
    space = Space(Net, inputs=[2])
    space.rate, space.other = 2.0, 5
    with pytest.raises(ConfigError, match=r"Space\.rate: found 3\.0; expected 2\.0, .*Make it a buffer"):
        space.rate = 3.0
    whole, x = Space(Net, inputs=[2], leaves=["."]), torch.ones(1, 2)
    before, whole.rate = whole(x), 6.0
    assert torch.allclose(whole(x), 3 * before) and whole.rate == whole.base.rate == 6.0


class Frozen(Net):
    """Does not train, and loads what was saved when `layer` had another name."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.layer.eval()
        return self

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *given: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "layer.")] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *given)


@pytest.mark.parametrize("leaves", [(), (".",)])
def test_a_space_trains_and_loads_as_its_base(leaves: tuple[str, ...]) -> None:
    prefix = "base." if leaves else ""
    space, state = Space(Frozen, inputs=[2], leaves=leaves).train(), Frozen().state_dict()
    assert space.training and not space.get_submodule(f"{prefix}layer").training
    space.load_state_dict({f"{prefix}{key.replace('layer.', 'old.')}": value for key, value in state.items()})
    assert torch.equal(space.state_dict()[f"{prefix}layer.weight"], state["layer.weight"])


def doubling() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, given, result: result * 2)
    return layer


def test_hooks_and_parametrizations_are_copied() -> None:
    space = Space(lambda: nn.Sequential(doubling(), weight_norm(nn.Linear(4, 4))), [Repeat("d", "*", [2])], inputs=[4])
    values = torch.randn(3, 4)
    hooked, normed = space.get_submodule("d_0_1.0"), space.get_submodule("d_1_1.1")
    assert isinstance(hooked, nn.Linear)
    assert torch.equal(hooked(values), 2 * hooked.forward(values))
    assert "parametrizations.weight.original0" in dict(normed.named_parameters())


def test_what_mutators_leave_unread_is_gone() -> None:
    base = partial(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    space = Space(base, [Input("skip", "2", {"type": "Linear"})], inputs=[4], decisions={"skip_0": 1})
    assert [name for name, _ in space.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    values, layers = torch.ones(1, 4), dict(space.named_modules())
    assert torch.equal(space(values), layers["2"](layers["0"](values)))
    mutators = [
        Repeat("again", "0", [2]),
        Insert("more", "0", {"linear": nn.Linear}),
        Repeat("less", {"path": "more_0"}, [0]),
        Repeat("fewer", {"path": "again_0_1.0"}, [0]),
    ]
    assert [node.id for node in Space(base, mutators, inputs=[4]).nodes] == ["input", "0", "1", "2", "output"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, values: Tensor) -> Any:
        return self.second(self.first(values))


@pytest.mark.parametrize("mutator", [Operator("o", "first", {"other": nn.Linear}), Repeat("r", "second", [2])])
def test_shared_parameters_are_not_divided_silently(mutator: Any) -> None:
    with pytest.raises(ConfigError, match=r"shares '\w+.weight' with '\w+.weight', which a new module would not"):
        Space(Tied, [mutator], inputs=[2])


class Pickled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, values: Tensor) -> Tensor:
        values = nn.functional.dropout(self.features(values), training=self.training)
        return nn.functional.gelu(self.second(values), approximate="tanh")[:, :3] * float("inf")

    def features(self, values: Tensor) -> Tensor:
        return torch.relu(self.first(values)) * self.scale


class Doubled(AbstractMutator):
    name = "doubled"

    def mutate(self, graph: ModelGraph) -> None:
        [place] = graph.find("second")
        readers = list(place.nodes[-1].users)
        node = graph.call("doubled_0", torch.add, [place.nodes[-1], place.nodes[-1]])
        for reader in readers:
            graph.connect(reader, node, 0)


MUTATORS: dict[str, list[AbstractMutator]] = {
    "none": [],
    "rewired": [
        Repeat("depth", "first", [3]),
        Branch("branch", "second", {"linear": nn.Linear}),
        Insert("more", "second", {"norm": partial(nn.LayerNorm)}),
    ],
    "called": [Doubled()],
}


def saved(space: Space) -> Any:
    file = io.BytesIO()
    torch.save(space, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda space: pickle.loads(pickle.dumps(space)), saved])
@pytest.mark.parametrize("mutators", MUTATORS)
def test_a_copy_computes_the_same(copied: Any, mutators: str) -> None:
    space = Space(Pickled, MUTATORS[mutators], inputs=[4])
    again = copied(space)
    values = torch.randn(5, 4)
    for mode in (True, False):
        for each in (space, again):
            each.train(mode)
        results = []
        for each in (space, again):
            torch.manual_seed(0)
            results.append(each(values))
        assert torch.equal(*map(torch.nan_to_num, results))
    assert (again.decisions, again.changes, again.nodes) == (space.decisions, space.changes, space.nodes)
    with torch.no_grad():
        next(again.parameters()).zero_()
    assert not torch.equal(next(again.parameters()), next(space.parameters()))
