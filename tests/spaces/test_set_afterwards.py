"""What is set in a space when it stands: hooks of modules that are followed are refused, buffers work."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Operator, Repeat, Space

REGISTER = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rate", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


def same(space: nn.Module) -> nn.Module:
    return space


def pickled(space: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(space))


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("again", [same, copy.deepcopy, pickled])
def test_hooks_of_modules_that_are_followed_are_refused(register: str, again: Any) -> None:
    space = again(Space(Net, inputs=[4]))
    with pytest.raises(ConfigError, match=r"found a new hook of a module whose forward a space has followed.*leaves"):
        getattr(space.block, register)(print)
    assert space(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(("path", "leaves"), [("", []), ("block.layer", []), ("block", ["block"])])
def test_hooks_of_what_is_called_are_called(path: str, leaves: list[str]) -> None:
    space, seen = Space(Net, inputs=[4], leaves=leaves), []
    space.get_submodule(path).register_forward_hook(lambda *given: seen.append(len(given)))
    space(torch.ones(2, 4))
    assert seen == [3]


def test_hooks_of_blocks_that_mutators_have_changed() -> None:
    plain = Operator("layer", "block.0", {"plain": partial(nn.Linear, bias=False)})
    twice: list[Any] = [plain, Repeat("depth", "block", [2])]
    space = Space(Plain, twice, inputs=[4])
    for path in ("block", "depth_0_1.block"):
        with pytest.raises(ConfigError, match="found a new hook"):
            space.get_submodule(path).register_forward_hook(print)
    whole = Space(Plain, [Operator("block", "block", {"linear": partial(nn.Linear, 4, 4)})], inputs=[4])
    with pytest.raises(ConfigError, match="found a new hook"):
        whole.block.register_forward_hook(print)


def test_a_buffer_of_a_module_that_is_followed_may_change() -> None:
    space, x = Space(Net, inputs=[4]), torch.ones(2, 4)
    before = space(x)
    space.block.rate = torch.tensor(4.0)
    assert torch.equal(space(x), 2 * before)
