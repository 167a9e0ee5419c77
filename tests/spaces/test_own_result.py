"""A space is compared with its base on random inputs, and neither leaves a trace."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces import Insert, Operator, Space


class Base(nn.Module):
    def __init__(self, leaf: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.leaf, self.last = leaf(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.leaf(x))  # type: ignore[no-any-return]


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


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(int(x.shape[1]))

    @staticmethod
    @cache
    def scale(size: int) -> Tensor:
        return torch.arange(float(size))


@pytest.mark.parametrize("leaves", [["leaf"], ["."]])
@pytest.mark.parametrize("mutates", [False, True])
def test_a_table_that_a_first_call_makes_is_made_anew(leaves: list[str], mutates: bool) -> None:
    where = "last" if leaves == ["leaf"] else "base"
    insert = Insert("new", where, {"tanh": nn.Tanh})
    space = Space(partial(Base, Table), [insert] if mutates else [], inputs=[4], leaves=leaves)
    leaf = space.get_submodule("leaf" if leaves == ["leaf"] else "base.leaf")
    assert isinstance(leaf, Table)
    assert leaf.table is None
    assert not leaf.tables
    x = torch.randn(3, 4)
    last = space.get_submodule("last" if leaves == ["leaf"] else "base.last")
    expected = last(x * torch.arange(4.0))
    assert torch.equal(space(x), torch.tanh(expected) if mutates else expected)


@pytest.mark.parametrize("leaves", [["leaf"], ["."]])
def test_a_table_of_a_function_is_of_values(leaves: list[str]) -> None:
    Scales.scale.cache_clear()
    space = Space(partial(Base, Scales), inputs=[4], leaves=leaves)
    assert type(space(torch.ones(2, 4))) is Tensor


def test_a_table_without_values_that_another_space_has_left_is_named() -> None:
    Scales.scale.cache_clear()
    with FakeTensorMode():
        Space(partial(Base, Scales), inputs=[4], leaves=["leaf"])
    with pytest.raises(ConfigError, match=r"reads a tensor without values.*functools\.cache"):
        Space(partial(Base, Scales), inputs=[4], leaves=["leaf"])
    Scales.scale.cache_clear()


def test_a_candidate_that_keeps_a_tensor_in_a_function_is_infeasible() -> None:
    Scales.scale.cache_clear()
    with pytest.raises(InfeasibleModelError, match=r"keep no tensor of their first call outside.*functools\.cache"):
        Space(partial(Base, nn.Identity), [Operator("new", "leaf", {"scales": Scales})], inputs=[4])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return x * self.calls


def test_a_buffer_that_forward_changes_is_put_back_between_the_two() -> None:
    space = Space(Counting, inputs=[4])
    assert torch.equal(space.calls, torch.zeros(4))
    assert torch.equal(space(torch.ones(1, 4)), torch.ones(1, 4))


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if hasattr(x, "lengths") else x * 2


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        k = h
        h += 1
        return k + h


class Draws(nn.Module):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        Draws.count += 1
        return x * Draws.count


@pytest.mark.parametrize(
    ("base", "leaves", "words"),
    [
        (Asks, [], "result 0 is (2, 4) of float32, and (2,) of float32 of the graph"),
        (Adds, [], "the values of result 0 differ by up to 1"),
        (partial(Base, Draws), ["leaf"], "something else each time that it is called"),
    ],
)
def test_what_is_known_of_a_difference_is_said(base: Callable[[], nn.Module], leaves: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        Space(base, inputs=[4], leaves=leaves)
    assert words in str(found.value)


def test_a_model_that_fails_on_random_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inputs: the forward of Embedding fails on random.*IndexError: index out"):
        Space(partial(nn.Embedding, 1, 4), inputs=[{"shape": [64], "dtype": "int64"}])


@pytest.mark.parametrize("base", [Asks, Adds, partial(nn.Linear, 4, 4)])
def test_shapes_of_inputs_are_always_wanted(base: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match="inputs: found None"):
        Space(base)


def test_nothing_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(seed: int) -> None:
        raise AssertionError(seed)

    base = nn.Sequential(nn.Linear(4, 4))
    state = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", seeded)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    Space(base, [Insert("new", "0", {"linear": nn.Linear})], inputs=[4])
    assert torch.equal(state, torch.get_rng_state())
