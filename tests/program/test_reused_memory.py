"""Operations that write into memory that nothing reads any more give the very bits of those that do not."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.program.flat_graph import reuse_memory

NUM_STEPS = 14

# All take (4, 6) and return it, so that any may follow any.
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.tanh,
    torch.relu,
    torch.neg,
    torch.sigmoid,
    lambda x: x * 1.5,
    lambda x: 1 - x,
    lambda x: x.clamp(-1, 1),
    lambda x: x.clone(),
    lambda x: x.double().float(),
    # Views, which are in the memory of another value.
    lambda x: x.reshape(6, 4).view(4, 6),
    lambda x: x.t().contiguous().t(),
    lambda x: x.t().reshape(6, 4).t(),
    lambda x: x[:1].expand(4, 6),
    lambda x: x.flatten()[torch.arange(24).flip(0)].view(4, 6),
    lambda x: torch.cat([x[2:], x[:2]]),
    lambda x: torch.where(x > 0, x, x.mean(1, keepdim=True)),
    lambda x: x.softmax(1),
    lambda x: torch.stack([*x.unbind(0)]),
    lambda x: x.split(2)[1].repeat(2, 1),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.atan2,
    lambda x, y: torch.add(x, y, alpha=0.5),
    lambda x, y: torch.addcmul(x, y, y, value=0.1),
    lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.ops.aten.tanh_backward(x, y),
    lambda x, y: torch.ops.aten.threshold_backward(x, y, 0),
    lambda x, y: x + y.sum(0),
    lambda x, y: (x @ y.t()) @ y,
    # Two uses of one value in one operation.
    lambda x, y: x * x + y * y,
]


def random_function(chance: random.Random) -> Callable[..., list[Tensor]]:
    """Return a function of two tensors, of whose values some are read again much later, or are results as well."""
    steps: list[tuple[Callable[..., Tensor], list[int]]] = []
    for number in range(2, 2 + NUM_STEPS):
        kind = chance.choice([UNARY, BINARY, BINARY])
        count = 1 if kind is UNARY else 2
        # Mostly the values of just before, so that many have their last use.
        places = [chance.choice([number - 1, chance.randrange(number)]) for _ in range(count)]
        steps.append((chance.choice(kind), places))
    kept = sorted({1 + NUM_STEPS, *chance.sample(range(2 + NUM_STEPS), 2)})

    def function(*arguments: Tensor) -> list[Tensor]:
        values = [*arguments]
        for step, places in steps:
            values.append(step(*[values[place] for place in places]))
        return [values[place] for place in kept]

    return function


def changed(module: GraphModule) -> int:
    """Let a graph's operations write into memory, and return how many do."""
    before = [node.target for node in module.graph.nodes]
    reuse_memory(module.graph)
    module.recompile()
    return sum(node.target is not target for node, target in zip(module.graph.nodes, before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_graphs_give_the_same_bits(seed: int) -> None:
    num_writes = 0
    for number in range(60):
        chance = random.Random(f"{seed} {number}")
        generator = torch.Generator().manual_seed(number)
        examples = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        if chance.random() < 0.3:
            examples[1] = torch.randn(6, 4, generator=generator).t()
        function = random_function(chance)
        plain = make_fx(function)(*examples)
        module = copy.deepcopy(plain)
        num_writes += changed(module)
        # Twice, as what is in the graph itself is to stay.
        for scale in (1.0, -0.7):
            arguments = [scale * each for each in examples]
            kept = [each.clone() for each in arguments]
            expected, found = plain(*[each.clone() for each in arguments]), module(*arguments)
            for x, y in zip(expected, found, strict=True):
                assert x.stride() == y.stride()
                assert torch.equal(x.view(torch.int32), y.view(torch.int32)), (seed, number)
            assert all(torch.equal(x, y) for x, y in zip(arguments, kept, strict=True)), (seed, number)
    # Else it says nothing.
    assert num_writes > 30


def test_a_value_that_is_read_later_stays() -> None:
    module = make_fx(lambda x: [y := x + 1, y.exp()])(torch.zeros(3))
    assert changed(module) == 0


def test_a_view_that_is_read_later_keeps_its_memory() -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        part = y[:2]
        return torch.cat([y.exp(), part])

    module = make_fx(function)(torch.zeros(3))
    assert changed(module) == 0
