"""The modes of modules: a function that takes one follows that module, and copies and new modules have their own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Repeat, Space


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4)


class Block(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x)))  # type: ignore[no-any-return]


class OwnMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, self.training)


class DropMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.layer(x), self.drop.p, self.drop.training)


class NormMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        norm, h = self.norm, self.layer(x)
        h = F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=norm.training)
        return F.dropout(h, 0.4, training=self.training)


class Within(Base):
    def __init__(self) -> None:
        super().__init__()
        self.block = NormMode()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.4, self.block.drop.training)


class Frozen(NormMode):
    """Its norm stays in evaluation, unless it is told otherwise itself."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self


class Holder(nn.Module):
    def __init__(self, inside: Callable[[], nn.Module] = Frozen) -> None:
        super().__init__()
        self.inside = inside()

    def forward(self, x: Tensor) -> Any:
        return self.inside(x)


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (OwnMode, "drop"),
    (DropMode, "drop"),
    (Within, "block"),
    (Within, "block.norm"),
    (Frozen, "norm"),
    (Holder, "inside.norm"),
]


def trained(model: nn.Module, before: Callable[[nn.Module], object]) -> list[Tensor]:
    """Return what three steps and evaluation make of a model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(3)
    found = []
    for _ in range(3):
        before(model)
        found.append(model(torch.randn(5, 4)))
        optimizer.zero_grad()
        found[-1].square().mean().backward()
        optimizer.step()
    before(model.eval())
    return [*found, model(torch.randn(5, 4)), *model.state_dict().values()]


@pytest.mark.parametrize(("make", "path"), CASES)
def test_a_space_follows_the_modes_of_its_modules(make: Callable[[], nn.Module], path: str) -> None:
    def set_modes(model: nn.Module, mode: bool = False) -> None:
        model.get_submodule(path).training = mode

    frozen = make()
    set_modes(frozen)
    for base, before in (
        (frozen, lambda model: model),
        (frozen, nn.Module.train),
        (make(), set_modes),
        (make(), partial(set_modes, mode=True)),
    ):
        space = Space(lambda base=base: copy.deepcopy(base), inputs=[4])
        for one, other in zip(trained(copy.deepcopy(base), before), trained(space, before), strict=True):
            assert torch.equal(one, other)


class Both(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, self.training and self.drop.training)


class Mixed(Base):
    """Takes a step only where its norm does not train as it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training and not self.norm.training else self.norm(x)


class Counted(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), int(self.drop.training) * 0.4, self.training)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (Both, r"computes something else than its graph.* except for training=self"),
        (Mixed, "computes something else than its graph"),
        (Counted, r"line \d+: .*on modes only as training=self"),
    ],
)
def test_what_is_not_the_mode_of_one_module_is_refused(base: type[nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Space(base, inputs=[4])
    assert Space(base, inputs=[4], leaves=["."])(torch.ones(2, 4)).shape == (2, 4)


def test_copies_follow_the_mode_of_their_own_module() -> None:
    space = Space(partial(Holder, DropMode), [Repeat("depth", "inside", [2])], inputs=[4])
    x = torch.randn(64, 4)
    space.inside.drop.eval()
    assert not torch.equal(space(x), space(x))
    space.get_submodule("depth_0_1.inside.drop").eval()
    assert torch.equal(space(x), space(x))


class FrozenBlock(Block):
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self


def blocks(kind: type[Block] = Block) -> nn.Module:
    base = nn.Sequential(kind(), kind())
    base[0].norm.eval()
    base[0].layer.requires_grad_(requires_grad=False)
    return base.train() if kind is FrozenBlock else base


def test_copies_keep_the_mode_and_whether_parameters_train() -> None:
    layers = dict(Space(blocks, [Repeat("depth", "*", [3])], inputs=[4]).named_modules())
    for number in (1, 2):
        assert [layers[f"depth_{place}_{number}.{place}.norm"].training for place in (0, 1)] == [False, True]
        assert layers[f"depth_0_{number}.0.drop"].training
        trains = [layers[f"depth_{place}_{number}.{place}.layer"].weight.requires_grad for place in (0, 1)]
        assert trains == [False, True]
    copied = Space(blocks, [Repeat("depth", "0", [2])], inputs=[4], leaves=["*"]).get_submodule("depth_0_1.0")
    assert copied.training and not copied.norm.training and copied.drop.training


def test_a_train_method_is_copied_with_its_block() -> None:
    space = Space(partial(blocks, FrozenBlock), [Repeat("depth", "0", [2])], inputs=[4])
    norm = space.get_submodule("depth_0_1.0.norm")
    for _ in range(2):
        assert not norm.training
        assert space.get_submodule("depth_0_1.0.drop").training
        space.eval()
        space.train()
    names = [f"{block}.{name}" for block in (0, 1, "depth_0_1.0") for name in Block().state_dict()]
    assert list(space.state_dict()) == names
