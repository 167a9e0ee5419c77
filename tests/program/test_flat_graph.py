"""The passes over a traced graph give the very bits of the operations as they were."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from mlotool.program import backends
from mlotool.program.backends import reuse_memory, simplified, with_shared_values

# All take (4, 6) and return it, so that any may follow any.
OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: 1 - x.exp(),
    lambda x, y: x.clone().double().float() * 1,
    # Views, which are in the memory of another value.
    lambda x, y: x.reshape(6, 4).view(4, 6),
    lambda x, y: x.t().contiguous().t(),
    lambda x, y: x[:1].expand(4, 6),
    lambda x, y: torch.stack([*x.unbind(0)]),
    lambda x, y: torch.where(x > 0, x, y.mean(1, keepdim=True)),
    lambda x, y: torch.addcmul(x, y, y, value=0.1),
    lambda x, y: (x @ y.t()) @ y,
    # Two uses of one value in one operation.
    lambda x, y: x * x + y * y,
]
NUM_STEPS = 14
_ATEN = torch.ops.aten
IN_PLACE = [_ATEN.exp_.default, _ATEN.mul_.Tensor, _ATEN.add_.Tensor, _ATEN.addcmul_.default]


def random_function(chance: random.Random) -> Callable[..., list[Tensor]]:
    """Return a function of two tensors, of whose values some are read again much later, or are results as well."""
    steps = [
        (chance.choice(OPERATIONS), [chance.choice([number - 1, chance.randrange(number)]) for _ in range(2)])
        for number in range(2, 2 + NUM_STEPS)
    ]
    kept = sorted({1 + NUM_STEPS, *chance.sample(range(2 + NUM_STEPS), 2)})

    def function(*arguments: Tensor) -> list[Tensor]:
        values = [*arguments]
        for step, places in steps:
            values.append(step(*[values[place] for place in places]))
        return [values[place] for place in kept]

    return function


@pytest.mark.one_in(2)
@pytest.mark.parametrize("large", [0, 1 << 20])
def test_random_graphs_give_the_same_bits(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "LARGE", large)
    num_saved = num_written = 0
    for number in range(24):
        generator = torch.Generator().manual_seed(number)
        examples = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        plain = make_fx(random_function(random.Random(number)))(*examples)
        expected, num_nodes = plain(*examples), len(plain.graph.nodes)
        module = simplified(plain)
        num_saved += num_nodes - len(module.graph.nodes)
        given, found = [x.clone() for x in examples], module(*examples)
        reuse_memory(module.graph)
        module.recompile()
        num_written += sum(node.target in IN_PLACE for node in module.graph.nodes)
        for x, *others in zip([*expected, *given], [*found, *given], [*module(*examples), *examples], strict=True):
            for y in others:
                assert x.stride() == y.stride() and torch.equal(x.view(torch.int32), y.view(torch.int32)), number
    # Else it says nothing.
    assert (num_saved > 12 or not large) and num_written > 24


def operations(graph: Any) -> Counter[str]:
    return Counter(node.name.split("_")[0] for node in graph.nodes if node.op == "call_function")


def test_a_large_value_that_nothing_waits_for_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one vector after the other share a slope; the matrix product is kept in any case."""

    def products(weight: Tensor, *vectors: Tensor) -> list[Tensor]:
        return [((weight @ weight.t()).sum() * weight.cos() + each).sum() for each in vectors]

    graph = make_fx(products)(*[torch.rand(64, 64) for _ in range(4)]).graph
    small = operations(with_shared_values(graph))
    monkeypatch.setattr(backends, "LARGE", 64 * 64)
    large = operations(with_shared_values(graph))
    assert (small["cos"], large["cos"], operations(graph)["cos"]) == (1, 3, 3)
    assert small["mm"] == large["mm"] == 1


FUNCTIONS = ["binary_cross_entropy_with_logits", "elu", "gelu", "hardtanh", "huber_loss", "l1_loss", "leaky_relu",
             "mse_loss", "smooth_l1_loss", "soft_margin_loss", "softplus", "softshrink"]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_a_graph_leaves_out_have_their_defaults(name: str) -> None:
    x, y = torch.randn(4, 1), torch.rand(4, 1)
    function = getattr(functional, name)
    values = (x, y) if name.endswith(("loss", "logits")) else (x,)
    graph = make_fx(lambda *arguments: [function(*arguments)])(*values)
    torch.testing.assert_close(backends._eager(graph, values, 0)(*values), [function(*values)])


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
