"""On the device dropout is drawn again in a pullback, and batches arrive as they are on the CPU."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import EvolutionStrategies, FirstOrder, Identity, Implicit, Neumann, Penalty, Unrolled
from mlotool.problem.streams.stream import SameBatch
from mlotool.program import Program, Stream
from tests.gpu.placed import follow, placed, relative_error
from tests.hypergradient import every_algorithm
from tests.problem.streams.test_stream import Noisy, Seeded, Whole
from tests.program.reweighting import reweighting
from tests.program.small import Mlp

Pair = namedtuple("Pair", ["input", "names"])


class Nested:
    """Batches of a mapping with a tuple in it, and with what is no tensor."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: Tensor) -> Any:
        pair = Pair(torch.as_tensor(indices).double(), "ab")
        return {"pair": pair, "list": [torch.as_tensor(indices)], "number": 3}


class Pinned(Whole):
    """Its data are in memory from which a GPU copies while the program goes on."""

    def __init__(self) -> None:
        super().__init__()
        if torch.cuda.is_available():
            self.data = self.data.pin_memory()

    def __getitems__(self, indices: Tensor) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        return {key: tensor.pin_memory() if torch.cuda.is_available() else tensor for key, tensor in batch.items()}


DATASETS = {
    "whole": Whole,
    "pinned": Pinned,
    "by_sample": Noisy,
    "seeded": Seeded,
    "nested": Nested,
    "tensor": lambda: torch.arange(30.0).reshape(10, 3),
}


def assert_same(found: Any, expected: Any, device: torch.device) -> None:
    leaves, structure = torch.utils._pytree.tree_flatten(found)
    others, other_structure = torch.utils._pytree.tree_flatten(expected)
    assert structure == other_structure
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, Tensor):
            assert a.device == device
            assert a.dtype == b.dtype
            assert torch.equal(a.cpu(), b)
        else:
            assert a == b


@pytest.mark.parametrize("name", DATASETS)
def test_batches_equal_those_on_the_cpu(name: str, device: torch.device) -> None:
    streams = [Stream(DATASETS[name](), 3, seed=5, drop_last=False) for _ in range(2)]
    streams[1].to(device)
    for _ in range(9):
        expected, ahead, found = streams[0].next(), streams[1].peek(), streams[1].next()
        assert_same(found, expected, device)
        assert_same(ahead, expected, device)
        assert_same(streams[1].last(), expected, device)
    for a, b in zip(streams[1].recent(5), streams[0].recent(5), strict=True):
        assert_same(a, b, device)


def test_what_is_made_of_a_stream_is_on_its_device(device: torch.device) -> None:
    stream = Stream(Whole(), 5, repeat=2).to(device)
    batch, same = stream.next(), SameBatch(stream).next()
    others = [stream.next(), stream.copy().next(), stream.at(stream.position()).last()]
    for each in (batch, same, *others):
        assert {tensor.device for tensor in each.values()} == {device}
    assert torch.equal(same["input"], batch["input"])
    assert torch.equal(others[0]["input"], batch["input"])
    converted = Stream(Whole(), 5).to(device, torch.float32).next()
    assert (converted["input"].dtype, converted["index"].dtype) == (torch.float32, torch.int64)
    again = Stream(Whole(), 5, repeat=2).to(device)
    again.load_state_dict(stream.state_dict())
    assert_same(again.next(), {key: tensor.cpu() for key, tensor in stream.next().items()}, device)


pytestmark = pytest.mark.gpu

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "identity": lambda: Implicit(Identity(0.1)),
    "neumann": lambda: Implicit(Neumann(3, 0.1)),
    "finite_difference": lambda: Implicit(Identity(0.1), "finite_difference"),
    "unrolled": Unrolled,
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.01),
}


def noisy(make: Callable[[], Any], device: torch.device) -> Program:
    return placed(reweighting(make, Mlp(nn.Dropout(0.5))), device)


def decayed(make: Callable[[], Any], device: torch.device) -> Program:
    """Return one whose upper problem has a gradient without any pullback as well."""
    return placed(every_algorithm.program(make, Mlp(nn.Dropout(0.5))), device)


def draws(device: torch.device) -> Tensor:
    return torch.rand(4, device=device)


def seeded_gradient(program: Program) -> dict[str, Tensor]:
    program.random.manual_seed(1)
    return program.gradient("weigher")


@pytest.mark.parametrize("solver", [lambda: Identity(0.1), lambda: Neumann(3, 0.1)], ids=["identity", "neumann"])
def test_finite_differences_see_the_same_masks(solver: Callable[[], Any], device: torch.device) -> None:
    """With other masks they would differ by more than their own size."""
    found = [
        seeded_gradient(follow(noisy(lambda product=product: Implicit(solver(), product), device), 3))
        for product in ("finite_difference", "reverse")
    ]
    assert relative_error(*found) < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gradient_is_the_same_bit_by_bit(name: str, device: torch.device) -> None:
    programs = [follow(noisy(ALGORITHMS[name], device), 3) for _ in range(2)]
    first, second = map(seeded_gradient, programs)
    assert all(torch.equal(first[key], second[key]) for key in first)


def drawn_after(make: Callable[[], Any], device: torch.device) -> Tensor:
    """Return what comes of the generator after two gradients, the first of which looks at the losses more closely."""
    program = follow(decayed(make, device), 3)
    for _ in range(2):
        seeded_gradient(program)
    with program.random:
        return draws(device)


def test_steps_that_are_taken_again_leave_the_generator_as_it_was(device: torch.device) -> None:
    assert torch.equal(drawn_after(Unrolled, device), drawn_after(FirstOrder, device))


@pytest.mark.parametrize("name", ["neumann", "finite_difference", "penalty"])
def test_a_pullback_draws_for_one_evaluation_however_many_it_takes(name: str, device: torch.device) -> None:
    assert torch.equal(drawn_after(ALGORITHMS[name], device), drawn_after(ALGORITHMS["identity"], device))


def test_the_devices_generator_belongs_to_the_program(device: torch.device) -> None:
    """In the turn of another one, and beside what is drawn outside."""
    alone = seeded_gradient(noisy(ALGORITHMS["identity"], device))
    made, other = (noisy(ALGORITHMS["identity"], device) for _ in range(2))
    made.random.manual_seed(1)
    torch.manual_seed(0)
    first = draws(device)
    other.gradient("weigher")
    torch.manual_seed(0)
    found = made.gradient("weigher")
    assert torch.equal(draws(device), first)
    assert all(torch.equal(found[key], alone[key]) for key in alone)
    state = made.random.state_dict()
    expected = made.gradient("weigher")
    made.random.load_state_dict(state)
    found = made.gradient("weigher")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
