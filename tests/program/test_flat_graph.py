"""The passes over a traced graph give the very bits of the operations as they were."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.program import flat_graph
from mlotool.program.decompositions import NARROW_SOFTMAX
from mlotool.program.flat_graph import reuse_memory, with_shared_values

# All take (4, 6) and return it, so that any may follow any.
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.relu,
    lambda x: 1 - x,
    lambda x: x.clone(),
    lambda x: x.double().float(),
    # Views, which are in the memory of another value.
    lambda x: x.reshape(6, 4).view(4, 6),
    lambda x: x.t().contiguous().t(),
    lambda x: x[:1].expand(4, 6),
    lambda x: x.flatten()[torch.arange(24).flip(0)].view(4, 6),
    lambda x: torch.where(x > 0, x, x.mean(1, keepdim=True)),
    lambda x: torch.stack([*x.unbind(0)]),
    lambda x: x.split(2)[1].repeat(2, 1),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.mul,
    torch.maximum,
    lambda x, y: torch.addcmul(x, y, y, value=0.1),
    lambda x, y: torch.ops.aten.tanh_backward(x, y),
    lambda x, y: x + y.sum(0),
    lambda x, y: (x @ y.t()) @ y,
    # Two uses of one value in one operation.
    lambda x, y: x * x + y * y,
]
NUM_STEPS = 14


def random_function(chance: random.Random) -> Callable[..., list[Tensor]]:
    """Return a function of two tensors, of whose values some are read again much later, or are results as well."""
    steps: list[tuple[Callable[..., Tensor], list[int]]] = []
    for number in range(2, 2 + NUM_STEPS):
        kind = chance.choice([UNARY, BINARY, BINARY])
        # Mostly the values of just before, so that many have their last use.
        places = [chance.choice([number - 1, chance.randrange(number)]) for _ in range(1 if kind is UNARY else 2)]
        steps.append((chance.choice(kind), places))
    kept = sorted({1 + NUM_STEPS, *chance.sample(range(2 + NUM_STEPS), 2)})

    def function(*arguments: Tensor) -> list[Tensor]:
        values = [*arguments]
        for step, places in steps:
            values.append(step(*[values[place] for place in places]))
        return [values[place] for place in kept]

    return function


def passed(module: GraphModule) -> tuple[GraphModule, int]:
    """Return a graph after the passes, and how many of its operations write into memory."""
    shared = GraphModule(module, with_shared_values(copy.deepcopy(module.graph)))
    before = [node.target for node in shared.graph.nodes]
    reuse_memory(shared.graph)
    shared.recompile()
    return shared, sum(node.target is not old for node, old in zip(shared.graph.nodes, before, strict=True))


@pytest.mark.parametrize("large", [0, 1 << 20])
def test_random_graphs_give_the_same_bits(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_graph, "LARGE", large)
    num_writes = 0
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        examples = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        plain = make_fx(random_function(random.Random(number)))(*examples)
        module, count = passed(plain)
        num_writes += count
        kept = [each.clone() for each in examples]
        # Twice, as what is in the graph itself is to stay.
        for _ in range(2):
            for x, y in zip(plain(*examples), module(*examples), strict=True):
                assert x.stride() == y.stride() and torch.equal(x.view(torch.int32), y.view(torch.int32)), number
        assert all(map(torch.equal, examples, kept)), number
    # Else it says nothing.
    assert num_writes > 4


def operations(graph: Any) -> Counter[str]:
    return Counter(node.name.split("_")[0] for node in graph.nodes if node.op == "call_function")


def test_a_large_value_that_nothing_waits_for_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one vector after the other share a slope; the matrix product is kept in any case."""

    def products(weight: Tensor, *vectors: Tensor) -> list[Tensor]:
        return [((weight @ weight.t()).sum() * weight.cos() + each).sum() for each in vectors]

    graph = make_fx(products)(*[torch.rand(64, 64) for _ in range(4)]).graph
    small = operations(with_shared_values(graph))
    monkeypatch.setattr(flat_graph, "LARGE", 64 * 64)
    large = operations(with_shared_values(graph))
    assert (small["cos"], large["cos"], operations(graph)["cos"]) == (1, 3, 3)
    assert small["mm"] == large["mm"] == 1


def drawn(x: Tensor) -> Tensor:
    generator = torch.Generator()
    return x * torch.randn(2, generator=generator) + torch.randn(2, generator=generator)


def constants(one: Any, other: Any) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [torch.full_like(x, one), torch.full_like(x, other)]


PAIRS = [(0.0, -0.0), (1, True), (1, 1.0), (float("nan"), 0.0)]
KEPT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    **{f"{one} and {other}": (constants(one, other), "full") for one, other in PAIRS},
    "random numbers": (drawn, "randn"),
    "writes": (lambda x: x.add_(1.0).clone() + x.add_(1.0), "add"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_looks_alike_and_is_not_stays_two(name: str) -> None:
    function, operation = KEPT[name]
    graph = make_fx(function)(torch.zeros(2)).graph
    assert operations(with_shared_values(graph))[operation] == operations(graph)[operation] >= 2


@pytest.mark.parametrize(
    "function", [lambda x: [y := x + 1, y.exp()], lambda x: torch.cat([(y := x + 1).exp(), y[:2]])]
)
def test_a_value_that_is_read_later_stays(function: Callable[[Tensor], Any]) -> None:
    assert passed(make_fx(function)(torch.zeros(3)))[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operation", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(
    ("shape", "dim", "is_taken"),
    # Few numbers, many classes and another dimension are left as they are.
    [
        ((32, 100, 3), -1, True),
        ((2000, 7), 1, True),
        ((10, 3), -1, False),
        ((100, 100), -1, False),
        ((7, 2000), 0, False),
    ],
)
def test_a_narrow_softmax_is_torchs(operation: Any, dtype: torch.dtype, shape: Any, dim: int, is_taken: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(shape, generator=generator, dtype=dtype)
    x.view(-1)[:3] = torch.tensor([-torch.inf, 100.0, -100.0])
    weight = torch.randn(shape, generator=generator, dtype=dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        output = operation(x, dim)
        return output.detach(), torch.autograd.grad(output, x, weight)[0]

    graph = make_fx(function, NARROW_SOFTMAX)(x)
    assert ("movedim" in graph.code or "permute" in graph.code) == is_taken
    for found, expected in zip(graph(x), function(x), strict=True):
        assert found.stride() == expected.stride()
        tolerance = 1e-14 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
