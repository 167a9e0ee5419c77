"""Batches that several runs ask for are read once, and no run sees what another one writes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.data import CropAndFlip, InMemoryDataset, Normalization
from mlotool.fusion.shared_batches import KeptData, share_reads
from mlotool.program import Stream


class Counted:
    """Counts what is read; a sample draws from the generator that the stream seeds."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.count = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        return {"input": torch.rand(3, 50, 50) + index, "target": index, "name": "a", "nested": [torch.zeros(2)]}


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


@pytest.mark.parametrize(("repeat", "num_workers"), [(1, 1), (2, 0)])
def test_each_batch_is_read_once_and_is_each_streams_own(repeat: int, num_workers: int) -> None:
    data = Counted()
    streams = [Stream(data, 4, seed=1, repeat=repeat, num_workers=num_workers) for _ in range(3)]
    alone = Stream(Counted(), 4, seed=1, repeat=repeat)
    assert len(share_reads([*streams, Stream(data, 4, seed=2)])) == 1
    for _ in range(7):
        expected = alone.next()
        batches = [each.next() for each in streams]
        for batch in batches:
            assert_same(batch, expected)
        assert len({id(each["input"]) for each in batches}) == 3
        assert [each.state_dict() for each in streams] == [alone.state_dict()] * 3
        assert_same(streams[1].last(), alone.last())
        assert_same(streams[2].recent(2), alone.recent(2))
    if not num_workers:
        assert data.count < 2 * alone.dataset.count
    others = [Stream(data, 4, seed=1), Stream(data, 4, seed=2), Stream(Counted(), 4, seed=1), Stream(data, 5, seed=1)]
    assert share_reads([*others, others[0], Stream(data, 4, seed=1).to(dtype=torch.float64)]) == []


def test_what_one_run_writes_into_its_batch_stays_its_own() -> None:
    data = Counted()
    streams = [Stream(data, 4, seed=1) for _ in range(3)]
    share_reads(streams)
    expected = Stream(Counted(), 4, seed=1)
    for _ in range(3):
        clean = expected.next()
        for number in (1, 0, 2):
            batch = streams[number].next()
            assert_same(batch, clean)
            # Large and small tensors, by an operator, by an address that was taken, and containers.
            batch["input"].clamp_(max=0.0)
            batch["nested"][0].add_(1.0)
            batch["target"].numpy()[:] = -1
            batch["new"] = batch.pop("name")
            assert int(streams[number].last()["target"][0]) == -1


def test_runs_at_different_places_read_right() -> None:
    data = Counted(12)
    streams = [Stream(data, 4, seed=1) for _ in range(3)]
    share_reads(streams)
    alone = [Stream(Counted(12), 4, seed=1) for _ in range(3)]
    for number in (0, 0, 0, 0, 1, 2, 1, 2, 2, 1, 1, 0, 2):
        assert_same(streams[number].next(), alone[number].next())
    streams[0].load_state_dict({"epoch": 0, "batches_consumed": 1})
    alone[0].load_state_dict({"epoch": 0, "batches_consumed": 1})
    for number in (0, 0, 1, 2, 0, 1, 2):
        assert_same(streams[number].next(), alone[number].next())


class Data:
    """Two splits, one of which augments; counts calls."""

    splits = ("train", "val")
    num_classes = 10

    def __init__(self) -> None:
        self.calls: list[int] = []
        images = torch.randint(256, (20, 3, 40, 40), dtype=torch.uint8)
        normalization, target = Normalization([0.5] * 3, [0.2] * 3), torch.arange(20)
        self.val = InMemoryDataset(images, target, normalization)
        self.train = InMemoryDataset(images, target, normalization, augmentation=CropAndFlip())
        read = self.val.__getitems__
        self.val.__getitems__ = lambda indices: self.calls.append(len(indices)) or read(indices)  # type: ignore[method-assign]

    def split(self, name: str) -> Any:
        return getattr(self, name)


def kept(room: int, num_readers: int = 2) -> tuple[Data, KeptData]:
    data = Data()
    wrapped = KeptData(data, room)
    wrapped.num_readers = num_readers
    return data, wrapped


def test_a_batch_is_read_once_and_each_evaluation_has_its_own() -> None:
    data, wrapped = kept(2**24)
    assert (wrapped.num_classes, wrapped.splits, len(wrapped.split("val"))) == (10, ("train", "val"), 20)
    for _ in range(3):
        for indices in ([0, 1, 2], [3, 4], [2, 1, 0]):
            batch = wrapped.split("val").__getitems__(indices)
            expected = data.val._inputs(torch.tensor(indices), None)["input"]
            assert torch.equal(batch["input"], expected)
            batch["input"].zero_()
            batch["target"].zero_()
    assert data.calls == [3, 2, 3]
    # What finds no room, augments or has one reader is read again.
    data, wrapped = kept(3 * 3 * 40 * 40 * 4 + 100)
    for _ in range(3):
        wrapped.split("val").__getitems__([0, 1, 2])
        wrapped.split("val").__getitems__([3])
    assert data.calls == [3, 1, 1, 1]
    assert wrapped.split("train") is data.train
    alone, wrapped = kept(2**24, num_readers=1)
    for _ in range(2):
        wrapped.split("val").__getitems__([0])
    assert alone.calls == [1, 1]
