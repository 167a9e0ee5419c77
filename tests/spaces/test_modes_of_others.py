"""A function that takes a module's mode follows that module, whosever forward calls it; else it is refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Insert, Operator, Repeat, Space


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4)


class OwnMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, self.training)


class DropMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), self.drop.p, self.drop.training)


class DropModeByTorch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.layer(x), self.drop.p, self.drop.training)


class EarlyDropMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        mode = self.drop.training
        return F.dropout(self.norm(x), 0.4, training=mode)


class NormMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        norm, h = self.norm, self.layer(x)
        h = F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=norm.training)
        return F.dropout(h, 0.4, training=self.training)


class DropForward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop.forward(self.layer(x))


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


BASES: list[Callable[[], nn.Module]] = [OwnMode, DropModeByTorch, EarlyDropMode, DropForward, Within, Holder]
READ = {"norm", "drop", "inside.norm", "inside.drop", "block", "block.drop", "block.norm"}
CASES = [(make, path) for make in BASES for path, _ in make().named_modules() if path in READ]


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


def assert_follows(make: Callable[[], nn.Module], before: Callable[[nn.Module], object]) -> None:
    base = make()
    space = Space(lambda: copy.deepcopy(base), inputs=[4])
    for one, other in zip(trained(base, before), trained(space, before), strict=True):
        assert torch.equal(one, other)


def as_it_is(model: nn.Module) -> object:
    return model


def set_modes(path: str, mode: bool, model: nn.Module) -> None:
    model.get_submodule(path).training = mode


@pytest.mark.parametrize(("make", "path"), CASES)
def test_a_module_that_the_constructor_sets_to_evaluation(make: Callable[[], nn.Module], path: str) -> None:
    def base() -> nn.Module:
        model = make()
        set_modes(path, False, model)
        return model

    assert_follows(base, as_it_is)
    assert_follows(base, nn.Module.train)


@pytest.mark.parametrize(("make", "path"), CASES)
def test_a_module_that_is_set_afterwards(make: Callable[[], nn.Module], path: str) -> None:
    for mode in (True, False):
        assert_follows(make, partial(set_modes, path, mode))


def test_dropout_in_evaluation_draws_where_its_module_trains() -> None:
    space, x = Space(DropMode, inputs=[4]).eval(), torch.randn(64, 4)
    assert torch.equal(space(x), space(x))
    space.drop.train()
    assert not torch.equal(space(x), space(x))


class Both(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, self.training and self.drop.training)


class Either(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, self.training or self.drop.training)


class Converted(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, bool(self.drop.training))


class Compared(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4, self.drop.training is True)


class Mixed(Base):
    """Takes a step only where its norm does not train as it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training and not self.norm.training else self.norm(x)


@pytest.mark.parametrize("base", [Both, Either, Converted, Compared, Mixed])
def test_what_is_not_the_mode_of_one_module_is_refused(base: type[nn.Module]) -> None:
    words = r"leaves: the model itself.* takes other steps in training.* the mode of one module \(training=self"
    with pytest.raises(ConfigError, match=words):
        Space(base, inputs=[4])
    assert Space(base, inputs=[4], leaves=["."])(torch.ones(2, 4)).shape == (2, 4)


class Indexed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), {True: 0.4, False: 0.4}[self.drop.training], self.training)


class Counted(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), int(self.drop.training) * 0.4, self.training)


@pytest.mark.parametrize("base", [Indexed, Counted])
def test_a_mode_that_is_no_condition_is_named(base: type[nn.Module]) -> None:
    words = r"the forward of the model itself.* line \d+: .*on modes of modules only as functions take them"
    with pytest.raises(ConfigError, match=words):
        Space(base, inputs=[4])


def test_modes_are_what_they_were() -> None:
    base = Within()
    base.block.drop.eval()
    before = [each.training for each in base.modules()]
    Space(base, inputs=[4])
    assert [each.training for each in base.modules()] == before
    assert not any(isinstance(each, torch.fx.Proxy) for module in base.modules() for each in vars(module).values())


class DropTwice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(F.dropout(x, 0.4, self.drop.training)))


@pytest.mark.parametrize("kind", [DropMode, DropTwice])
def test_copies_follow_the_mode_of_their_own_module(kind: type[nn.Module]) -> None:
    space = Space(partial(Holder, kind), [Repeat("depth", "inside", [2])], inputs=[4])
    x = torch.randn(64, 4)
    space.inside.drop.eval()
    assert not torch.equal(space(x), space(x))
    space.get_submodule("depth_0_1.inside.drop").eval()
    assert torch.equal(space(x), space(x))


def test_a_new_function_follows_what_it_has_followed() -> None:
    insert = Insert("new", ":dropout", {"norm": nn.BatchNorm1d})
    space = Space(DropMode, [Operator("layer", "layer", {"plain": partial(nn.Linear, bias=False)}), insert], inputs=[4])
    x = torch.randn(64, 4)
    space.drop.eval()
    space.new_0.eval()
    assert torch.equal(space(x), space(x))
