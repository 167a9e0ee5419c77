"""Batches that several runs ask for are read once, and no run sees what another one writes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.data import CropAndFlip, InMemoryDataset, Normalization
from mlotool.fusion.shared_batches import KeptData, copied, share_reads
from mlotool.problem.batches import Share
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


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("repeat", [1, 2])
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


def test_runs_at_different_places_read_right_and_a_run_that_has_left_is_not_waited_for() -> None:
    data = Counted(12)
    streams = [Stream(data, 4, seed=1) for _ in range(3)]
    [reads] = share_reads(streams)
    alone = [Stream(Counted(12), 4, seed=1) for _ in range(3)]
    for number in (0, 0, 0, 0, 1, 2, 1, 2, 2, 1, 1, 0, 2):
        assert_same(streams[number].next(), alone[number].next())
    streams[0].load_state_dict({"epoch": 0, "batches_consumed": 1})
    alone[0].load_state_dict({"epoch": 0, "batches_consumed": 1})
    for number in (0, 0, 1, 2, 0, 1, 2):
        assert_same(streams[number].next(), alone[number].next())
    reads.leave(streams[0])
    kept = [*reads._kept]
    assert_same(streams[0].next(), alone[0].next())
    assert [*reads._kept] == kept
    del streams[1], alone[1]
    before = data.count
    for _ in range(3):
        assert_same(streams[1].next(), alone[1].next())
    assert data.count <= before + 12
    assert not reads._kept


def test_the_memory_of_what_is_kept_is_bounded() -> None:
    data = Counted(40)
    streams = [Stream(data, 4, seed=1) for _ in range(2)]
    [reads] = share_reads(streams, max_bytes=3 * 4 * 3 * 50 * 50 * 4)
    for _ in range(9):
        streams[0].next()
    assert len(reads._kept) == 2
    alone = Stream(Counted(40), 4, seed=1)
    for _ in range(9):
        assert_same(streams[1].next(), alone.next())


def test_streams_of_other_seeds_data_or_dtypes_share_nothing() -> None:
    data = Counted()
    others = [Stream(data, 4, seed=1), Stream(data, 4, seed=2), Stream(Counted(), 4, seed=1), Stream(data, 5, seed=1)]
    assert share_reads([*others, Stream(data, 4, seed=1).to(dtype=torch.float64)]) == []
    assert share_reads([others[0], others[0]]) == []


@dataclass(frozen=True)
class Part:
    """What a data set may return."""

    values: Tensor
    name: str


def test_copies_keep_their_containers() -> None:
    batch = {"a": (torch.ones(2), [3]), "share": Share({"x": torch.ones(1)}, 0.5), "part": Part(torch.ones(2), "b")}
    twin = copied(batch)
    assert twin["part"].name == "b"
    assert twin["share"].weight == 0.5
    for one, other in zip(
        (twin["a"][0], twin["part"].values, twin["share"].batch["x"]), [torch.ones(2)] * 2, strict=False
    ):
        one.add_(1)
        assert torch.equal(other, torch.ones(2))
    assert torch.equal(batch["a"][0], torch.ones(2))
    assert torch.equal(batch["part"].values, torch.ones(2))
    assert torch.equal(batch["share"].batch["x"], torch.ones(1))


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


def test_what_finds_no_room_or_augments_is_read_again() -> None:
    data, wrapped = kept(3 * 3 * 40 * 40 * 4 + 100)
    for _ in range(3):
        wrapped.split("val").__getitems__([0, 1, 2])
        wrapped.split("val").__getitems__([3])
    assert data.calls == [3, 1, 1, 1]
    assert wrapped.split("train") is data.train
    alone, wrapped = kept(2**24, num_readers=1)
    for _ in range(2):
        first: Tensor = wrapped.split("val").__getitems__([0])["input"]
        assert first.shape == (1, 3, 40, 40)
    assert alone.calls == [1, 1]
