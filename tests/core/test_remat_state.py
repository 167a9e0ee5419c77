"""Blocks of `remat` that are handed a mutable object, or keep something themselves: the exact gradient, or an error."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from mlotool import remat
from mlotool.core.errors import ConfigError

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Cache:
    """Of keys, as in language models."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


class Block(nn.Module):
    """Attention over keys that go through a function first: to keep equal ones twice changes no result."""

    def __init__(self, through: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.through = through
        self.double()

    def forward(self, x: Tensor, *given: Any, **options: Any) -> Tensor:
        keys = self.through(self, self.key(x), *given, **options)
        return x + (self.query(x) @ keys.mT).softmax(-1) @ keys


def slopes(block: Block, call: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    return list(torch.autograd.grad(call(block, X, *given).square().sum(), list(block.parameters())))


def plain(block: Block, *given: Any) -> Tensor:
    found: Tensor = block(*given)
    return found


def in_list(block: Any, keys: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(keys)
    return torch.cat(kept, 1)


def in_array(block: Any, keys: Tensor, counts: Any) -> Tensor:
    counts += 1
    return keys * float(counts.sum())


def in_static(block: Any, keys: Tensor, cache: Any) -> Tensor:
    cache.buffer[:] = keys.detach()
    return keys


def generated() -> Iterator[float]:
    while True:
        yield random.random()


def with_random(block: Any, keys: Tensor, source: Any) -> Tensor:
    return keys * float(source.random())


class Static:
    def __init__(self) -> None:
        self.buffer = torch.zeros(2, 3, 4, dtype=torch.float64)


HANDED: dict[str, tuple[Callable[..., Tensor], Callable[[], Any], str]] = {
    "a cache in a list": (
        lambda block, keys, caches: caches[0].update(keys),
        lambda: [Cache()],
        "use_cache=False in Hugging Face's models",
    ),
    "a list": (in_list, list, "a list, is changed"),
    "an array": (in_array, lambda: numpy.zeros(2), "a ndarray of shape"),
    "a buffer that is written to": (in_static, Static, "a Static, has changed"),
    "a generator": (lambda block, keys, numbers: keys * next(numbers), generated, "is an iterator"),
    "a generator of Python": (with_random, lambda: random.Random(0), "a Random, has changed"),
}


@pytest.mark.parametrize("name", HANDED)
def test_what_is_handed_in_stays_or_is_refused(name: str) -> None:
    through, make, said = HANDED[name]
    with pytest.raises(ConfigError, match=said):
        slopes(Block(through), remat, make())


def test_what_has_changed_before_the_backward_pass_is_refused() -> None:
    scale = Static()
    block = Block(lambda block, keys, scale: keys * scale.buffer.cos())
    found = remat(block, X, scale).sum()
    scale.buffer.add_(1.0)
    with pytest.raises(ConfigError, match="has changed since the first evaluation"):
        torch.autograd.grad(found, list(block.parameters()))


READ: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "an array": (lambda block, keys, given: keys * float(given.sum()), lambda: numpy.ones(3)),
    "an object": (lambda block, keys, given: keys + given.buffer, Static),
    "a module": (lambda block, keys, given: given(keys), lambda: nn.Linear(4, 4).double().requires_grad_(False)),
    "no cache": (lambda block, keys, given: keys if given is None else given.update(keys), lambda: None),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_only_read_goes_through(name: str) -> None:
    through, make = READ[name]
    given = make()
    expected, found = (slopes(Block(through), call, given) for call in (plain, remat))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


KEPT: list[Tensor] = []


def in_attribute(block: Any, keys: Tensor) -> Tensor:
    block.kept = [*getattr(block, "kept", []), keys]
    return torch.cat(block.kept, 1)


def in_global(block: Any, keys: Tensor) -> Tensor:
    KEPT.append(keys.detach())
    return torch.cat(KEPT, 1)


def last(block: Any, keys: Tensor) -> Tensor:
    block.last, before = keys.detach(), getattr(block, "last", 0.0)
    return keys + 0.1 * before


def counted(block: Any, keys: Tensor) -> Tensor:
    block.count = getattr(block, "count", 0) + 1
    return keys * (1 + 1e-4 * block.count)


STATE = {
    "a list of tensors": (in_attribute, "attribute 'kept'|another shape"),
    "a global list": (in_global, "another shape"),
    "what it saw last": (last, "returned something else"),
    "a counter that hardly matters": (counted, "returned something else"),
}


@pytest.mark.parametrize("name", STATE)
def test_what_a_block_keeps_is_refused_where_it_counts(name: str) -> None:
    through, said = STATE[name]
    KEPT.clear()
    with pytest.raises(ConfigError, match=said):
        slopes(Block(through), remat)


def test_a_counter_is_seen_within_tasks() -> None:
    block, scales = Block(counted), torch.linspace(0.5, 1.5, 3, dtype=torch.float64)
    weights = (scales[:, None, None] * block.key.weight).detach().requires_grad_()

    def one(weight: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(net, {"0.key.weight": weight}, (X,))
        return found.square().sum()

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = remat(self[0], x)
            return found

    net = Net(block)
    with pytest.raises(ConfigError, match="returned something else"):
        torch.autograd.grad(torch.vmap(one)(weights).sum(), weights)


@pytest.mark.parametrize("step", [3, 6])
def test_a_block_that_changes_in_a_later_call_is_seen(step: int) -> None:
    def late(block: Any, keys: Tensor) -> Tensor:
        block.count = getattr(block, "count", 0) + 1
        return keys * (2.0 if block.count > 2 * step else 1.0)

    block = Block(late)
    block.count = 1
    for _ in range(step - 1):
        slopes(block, remat)
    with pytest.raises(ConfigError, match="returned something else"):
        slopes(block, remat)
