"""Batches arrive on the device as they are on the CPU, in their order, also after a resume."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.problem.stream import SameBatch
from mlotool.program import Stream
from tests.problem.test_stream import Noisy, Seeded, Whole

pytestmark = pytest.mark.gpu

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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_from_its_position(num_workers: int, device: torch.device) -> None:
    whole = Stream(Noisy(), 3, seed=5, drop_last=False)
    expected = [whole.next() for _ in range(8)]
    first = Stream(Noisy(), 3, seed=5, drop_last=False, num_workers=num_workers).to(device)
    for batch in expected[:5]:
        assert_same(first.next(), batch, device)
    second = Stream(Noisy(), 3, seed=5, drop_last=False, num_workers=num_workers).to(device)
    second.load_state_dict(first.state_dict())
    assert_same(second.last(), expected[4], device)
    for batch in expected[5:]:
        assert_same(second.next(), batch, device)


def test_what_is_made_of_a_stream_is_on_its_device(device: torch.device) -> None:
    stream = Stream(Whole(), 5, repeat=2).to(device)
    batch, same = stream.next(), SameBatch(stream).next()
    others = [stream.next(), stream.copy().next(), stream.at(stream.position()).last()]
    for each in (batch, same, *others):
        assert {tensor.device for tensor in each.values()} == {device}
    assert torch.equal(same["input"], batch["input"])
    assert torch.equal(others[0]["input"], batch["input"])


def test_floating_point_numbers_are_converted(device: torch.device) -> None:
    batch = Stream(Whole(), 5).to(device, torch.float32).next()
    assert (batch["input"].dtype, batch["index"].dtype) == (torch.float32, torch.int64)
    assert {tensor.device for tensor in batch.values()} == {device}
