"""What nobody reads, what others share, and hooks."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mlotool.spaces import Input, Insert, Operator, Repeat, Space


def test_what_a_mutator_leaves_unread_is_gone() -> None:
    base = partial(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    skip = Input("skip", "2", {"type": "Linear"})
    space = Space(base, [skip], inputs=[4], decisions={"skip_0": 1})
    assert [name for name, _ in space.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    values = torch.ones(1, 4)
    layers = dict(space.named_modules())
    assert torch.equal(space(values), layers["2"](layers["0"](values)))


def test_what_nobody_has_read_before_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.idle = nn.BatchNorm1d(2)

        def forward(self, values: Tensor) -> Tensor:
            self.idle(values)
            return torch.relu(self.layer(values))

    space = Space(Net, [Operator("act", {"type": "relu"}, {"tanh": nn.Tanh})], inputs=[2])
    before = dict(space.named_buffers())["idle.running_mean"].clone()
    space(torch.randn(5, 2))
    assert not torch.equal(before, dict(space.named_buffers())["idle.running_mean"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        return self.second(self.first(values))


@pytest.mark.parametrize(
    "mutator",
    [Operator("other", "first", {"other": nn.Linear}), Repeat("depth", "second", [2])],
)
def test_shared_parameters_are_not_divided_silently(mutator: Operator | Repeat) -> None:
    with pytest.raises(ValueError, match=r"shares '\w+.weight' with '\w+.weight', and a new module would not"):
        Space(Tied, [mutator], inputs=[2])


def test_hooks_of_what_is_followed() -> None:
    def base() -> nn.Module:
        inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        inner.register_forward_hook(lambda module, given, result: result * 2)
        return nn.Sequential(inner)

    with pytest.raises(ValueError, match=r"found hooks of '0'.*Write leaves: \['0'\]"):
        Space(base, inputs=[2])
    torch.manual_seed(0)
    plain = base()
    torch.manual_seed(0)
    assert torch.equal(Space(base, inputs=[2], leaves=["0"])(torch.ones(2)), plain(torch.ones(2)))


def test_what_a_mutator_makes_and_another_takes_out_is_gone() -> None:
    base = partial(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    mutators = [
        Repeat("again", "0", [2]),
        Insert("more", "0", {"linear": nn.Linear}),
        Repeat("less", {"path": "more_0"}, [0]),
        Repeat("fewer", {"path": "again_0_1.0"}, [0]),
    ]
    space = Space(base, mutators, inputs=[4])
    assert [each.id for each in space.nodes] == ["input", "0", "1", "output"]
    assert [name for name, _ in space.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
