"""Evaluations of several runs read the batches of a split once."""

from typing import Any

import torch
from torch import Tensor

from mlotool.data import CropAndFlip, InMemoryDataset, Normalization
from mlotool.fusion.shared_batches import KeptData, Room


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
    wrapped = KeptData(data, Room(room))
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
