"""Equal operations of a flat graph are one, where that does not raise its peak of memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.program.flat_graph import peak_bytes, with_shared_values


def traced(function: Callable[..., Any], *arguments: Tensor) -> tuple[GraphModule, GraphModule]:
    """Return the graph of a function, and the one with shared values; both compute the same bits."""
    alone = make_fx(function)(*arguments)
    shared = GraphModule(alone, with_shared_values(alone.graph))
    shared.graph.lint()
    for ours, theirs in zip(shared(*arguments), alone(*arguments), strict=True):
        assert torch.equal(ours, theirs)
    return alone, shared


def operations(module: GraphModule) -> Counter[str]:
    return Counter(node.name.split("_")[0] for node in module.graph.nodes if node.op == "call_function")


def products(weight: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """One product a vector; the slope and a product with the weight do not depend on it."""
    found = []
    for vector in vectors:
        slope = weight.sin().cos()
        curved = (weight[:2] @ weight.t()).sum() * slope
        # Much is in use here, and the slope has none of its uses left.
        wide = torch.cat([curved + vector, curved - vector])
        found.append((wide.sin() * wide.tanh()).sum() + (slope.t().reshape(-1) * vector[0, 0]).sum())
    return tuple(found)


def test_a_large_value_is_taken_again_instead_of_kept() -> None:
    arguments = [torch.rand(64, 64) for _ in range(4)]
    alone, shared = traced(products, *arguments)
    assert peak_bytes(shared.graph) <= peak_bytes(alone.graph)
    # Of all that is equal the matrix product alone is kept: it takes time.
    assert operations(alone)["mm"] == 3
    assert operations(shared)["mm"] == 1
    assert 1 < operations(shared)["cos"] <= operations(alone)["cos"]


def test_what_takes_no_more_memory_is_one() -> None:
    alone, shared = traced(lambda x: (x.exp() + 1.0, x.exp() * 2.0, x.exp().t() + 1.0), torch.randn(8, 8))
    assert operations(alone)["exp"] == 3
    assert operations(shared)["exp"] == 1
    assert peak_bytes(shared.graph) <= peak_bytes(alone.graph)


@pytest.mark.parametrize("constants", [(0.0, -0.0), (1, True), (1, 1.0), (float("nan"), 0.0)])
def test_constants_that_look_alike_are_two(constants: tuple[Any, Any]) -> None:
    alone = make_fx(lambda x: tuple(torch.full_like(x, each) for each in constants))(torch.zeros(2))
    shared = with_shared_values(alone.graph)
    assert [node.name for node in shared.nodes] == [node.name for node in alone.graph.nodes]


def test_random_numbers_are_drawn_as_often_as_before() -> None:
    generator = torch.Generator()
    alone = make_fx(lambda x: x * torch.randn(2, generator=generator) + torch.randn(2, generator=generator))(
        torch.zeros(2)
    )
    assert sum(node.name.startswith("randn") for node in with_shared_values(alone.graph).nodes) == 2


def test_writes_are_as_many_as_before() -> None:
    alone = make_fx(lambda x: x.add_(1.0).clone() + x.add_(1.0))(torch.zeros(2))
    assert sum(node.name.startswith("add_") for node in with_shared_values(alone.graph).nodes) == sum(
        node.name.startswith("add_") for node in alone.graph.nodes
    )


def test_a_nan_is_equal_to_itself() -> None:
    alone = make_fx(lambda x: (x + float("nan")) * (x + float("nan")))(torch.zeros(2))
    assert sum(node.name.startswith("add") for node in with_shared_values(alone.graph).nodes) == 1
    assert sum(node.name.startswith("add") for node in alone.graph.nodes) == 2


def test_parts_of_a_value_that_is_taken_again_are_of_the_new_one() -> None:
    """A view keeps the memory that it is a part of."""

    def rows(weight: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        found = []
        for vector in vectors:
            row = weight.sin().t()[0]
            wide = (weight @ vector).exp()
            found.append((wide * wide.cos() * torch.cat([wide, wide]).sum()).sum() + row.sum())
        return tuple(found)

    alone, shared = traced(rows, *[torch.randn(64, 64) for _ in range(4)])
    assert peak_bytes(shared.graph) <= peak_bytes(alone.graph)


def test_the_peak_is_that_of_values_until_their_last_use() -> None:
    def steps(x: Tensor) -> Tensor:
        # Two at a time: each and the one before, of 400 bytes; a view has none of its own.
        return x.exp().view(10, 10).sin().cos().t().sum()

    assert peak_bytes(make_fx(steps)(torch.zeros(100)).graph) == 800
