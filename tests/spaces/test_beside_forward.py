"""What a base offers beside its forward: it works in its space, or is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Operator, Space
from mlotool.spaces.bases import LostMethodError


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
    def called(cls, *values: Any) -> tuple[str, int]:
        return cls.__name__, len(values)

    @property
    def heat(self) -> Tensor:
        return self.temperature

    @heat.setter
    def heat(self, value: float) -> None:
        self.temperature.fill_(value)

    def above(self) -> str:
        return super().extra_repr()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rate * self.temperature


def test_what_a_class_holds_is_what_it_is() -> None:
    space, x = Space(Net, inputs=[2]), torch.tensor([-1.0, 2.0])
    assert (space.count(1), space.called(1, 2)) == (1, ("Net", 2))
    assert torch.equal(space.act(x), torch.relu(x)) and isinstance(space.kind(), nn.ReLU)


@pytest.mark.parametrize("leaves", [(), ("layer",), (".",)])
def test_a_property_is_set_by_the_base(leaves: tuple[str, ...]) -> None:
    space, x = Space(Net, inputs=[2], leaves=leaves), torch.ones(1, 2)
    before = space(x)
    space.heat = 3.0
    assert float(space.heat) == 3.0
    assert torch.allclose(space(x), 3 * before)


def test_a_number_that_the_graph_has_is_not_changed_in_silence() -> None:
    space = Space(Net, inputs=[2])
    space.rate, space.other = 2.0, 5
    with pytest.raises(
        LostMethodError, match=r"Space\.rate: found the new value 3\.0 of what is 2\.0.*register_buffer"
    ):
        space.rate = 3.0
    whole, x = Space(Net, inputs=[2], leaves=["."]), torch.ones(1, 2)
    before, whole.rate = whole(x), 6.0
    assert torch.allclose(whole(x), 3 * before) and whole.rate == 6.0


def test_a_method_that_wants_an_object_of_the_class_is_refused() -> None:
    with pytest.raises(LostMethodError, match=r"Net\.above: calls super\(\).*leaves"):
        Space(Net, inputs=[2]).above()
    assert Space(Net, inputs=[2], leaves=["."]).above() == ""


@pytest.mark.parametrize("name", ["zero_grad", "to", "half", "modules", "named_buffers", "apply"])
def test_own_methods_of_torchs_names_are_refused(name: str) -> None:
    kind = type("Own", (Net,), {name: lambda self, *given, **named: getattr(nn.Module, name)(self, *given, **named)})
    with pytest.raises(ConfigError, match=rf"Own\.{name}, which a space has from torch"):
        Space(kind, inputs=[2])


class Noting(nn.Module):
    def __init__(self, notes: Any) -> None:
        super().__init__()
        self.layer, self.notes = nn.Linear(2, 2), notes

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if isinstance(self.notes, list):
            self.notes.append(x)
        else:
            self.notes["x"] = x
        return x * 2


@pytest.mark.parametrize("notes", [[], {}, {"x": 0}], ids=str)
def test_lists_that_forward_fills_are_refused(notes: Any) -> None:
    was = type(notes)(notes)
    with pytest.raises(ConfigError, match="sets its own attribute 'notes' in forward"):
        Space(lambda: Noting(notes), inputs=[2])
    assert notes == was


class Stack(nn.Module):
    def __init__(self, blocks: int = 0, down: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(blocks))
        self.first, self.down = nn.Linear(2, 2), nn.Linear(2, 2) if down else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.first(x) if self.down is None else self.down(x)


@pytest.mark.parametrize("leaf", ["blocks.*", "blocks.*.0", "blocks.**", "down", "first"])
def test_leaves_may_be_parts_that_a_base_is_without(leaf: str) -> None:
    assert Space(Stack, inputs=[2], leaves=[leaf])(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("leaf", ["block.*", "first.0", "downs", "blocks.0"])
def test_leaves_that_are_none_are_refused(leaf: str) -> None:
    with pytest.raises(ConfigError, match="which is no module of Stack"):
        Space(Stack, inputs=[2], leaves=[leaf])


def test_copies_keep_no_model_alive() -> None:
    import gc
    import weakref

    from mlotool.spaces import Repeat

    made: list[Any] = []

    def base() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        made.append(weakref.ref(model[0]))
        return model

    space = Space(base, [Repeat("more", "1", [4])], inputs=[2])
    gc.collect()
    # The first of each model that was made for a copy of the second one.
    assert len(made) == 4 and [each() is not None for each in made] == [True, False, False, False]
    assert sum(isinstance(each, nn.Linear) for each in space.modules()) == 5


def test_a_class_is_kept() -> None:
    space = Space(Net, [Operator("layer", "layer", {"same": None})], inputs=[2])
    assert space.count(1, 2, 3) == 3


class Renamed(Net):
    """Loads what was saved when `layer` had another name."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *given: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "layer.")] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *given)


@pytest.mark.parametrize("leaves", [(), (".",)])
def test_a_space_loads_state_as_its_base(leaves: tuple[str, ...]) -> None:
    space, state = Space(Renamed, inputs=[2], leaves=leaves), Renamed().state_dict()
    prefix = "base." if leaves else ""
    old = {f"{prefix}{key.replace('layer.', 'old.')}": value for key, value in state.items()}
    assert not torch.equal(space.state_dict()[f"{prefix}layer.weight"], state["layer.weight"])
    space.load_state_dict(old)
    assert torch.equal(space.state_dict()[f"{prefix}layer.weight"], state["layer.weight"])
