"""Data objects of the user's, as streams see them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from mlotool.config.user_data import LimitedData, NamedSamples, UserData, built_data, split_of
from mlotool.core.errors import ConfigError
from mlotool.data import InMemoryTensors
from mlotool.problem.streams.batches import BatchFetcher
from mlotool.program import Stream


class Data:
    """One data set as every split."""

    splits = ("train",)

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def split(self, name: str) -> Any:
        return self.dataset


class Flipped(TensorDataset):
    """A user's own way of reading."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return super().__getitem__(len(self) - 1 - index)


def pairs(kind: type[Dataset[Any]] = TensorDataset) -> Any:
    generator = torch.Generator().manual_seed(0)
    return kind(torch.rand(7, 2, 3, generator=generator), torch.randint(4, (7,), generator=generator))  # type: ignore[call-arg]


def test_pairs_of_tensors_are_read_by_batches_with_the_same_values() -> None:
    found = UserData(Data(pairs()), seed=0).split("train")
    assert isinstance(found, InMemoryTensors)
    ours, theirs = (Stream(each, 3, seed=1, drop_last=False) for each in (found, NamedSamples(pairs())))
    for _ in range(7):
        batch, expected = ours.next(), theirs.next()
        assert [*batch] == [*expected]
        for name, value in expected.items():
            assert (batch[name].dtype, batch[name].shape) == (value.dtype, value.shape)
            assert torch.equal(batch[name], value)


@pytest.mark.parametrize(
    "dataset",
    [pairs(Flipped), TensorDataset(torch.rand(3, 2, requires_grad=True), torch.rand(3)), TensorDataset(torch.rand(3))],
    ids=["a subclass", "with a gradient", "one tensor"],
)
def test_other_data_sets_are_read_by_their_own_code(dataset: Any) -> None:
    found = UserData(Data(dataset), seed=0).split("train")
    assert isinstance(found, NamedSamples)
    assert found.dataset is dataset


class AtFirst:
    """Draws its splits when it is made."""

    splits = ("train", "val")

    def __init__(self) -> None:
        order = np.random.permutation(20)
        self.places = {"train": order[:15], "val": order[15:]}

    def split(self, name: str) -> Any:
        return Subset(range(20), self.places[name].tolist())  # type: ignore[arg-type]


class AtEachCall(AtFirst):
    """Draws both splits each time that one is asked for."""

    def __init__(self) -> None:
        pass

    def split(self, name: str) -> Any:
        order = np.random.permutation(20)
        return Subset(range(20), (order[:15] if name == "train" else order[15:]).tolist())  # type: ignore[arg-type]


class ByTorchsWay(AtEachCall):
    def split(self, name: str) -> Any:
        return random_split(range(20), [15, 5])[self.splits.index(name)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [AtFirst, AtEachCall, ByTorchsWay])
def test_splits_that_are_drawn_are_the_same_wherever_the_data_are_built(kind: type[AtFirst]) -> None:
    def samples(seed: int, name: str) -> list[Any]:
        dataset = built_data(kind, seed).split(name)
        return [dataset[index] for index in range(len(dataset))]

    train = samples(0, "train")
    outside = np.random.rand(), random.random(), torch.rand(())
    assert outside  # what is drawn in between changes nothing
    assert samples(0, "train") == train
    assert sorted(train + samples(0, "val")) == [*range(20)]
    assert samples(1, "train") != train


def longest_last(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    samples = sorted(samples, key=lambda sample: len(sample[0]))
    inputs, targets = zip(*samples, strict=True)
    return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.tensor(targets)


class Sequences(LightningDataModule):
    """Draws its data in setup."""

    num_classes = 2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.data = [(torch.rand(1 + number % 3), number) for number in range(30)]

    def train_dataloader(self) -> Any:
        return DataLoader(self.data[:20], 4, shuffle=True, collate_fn=longest_last, drop_last=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return [DataLoader(self.data[20:], 3, collate_fn=longest_last)]  # type: ignore[arg-type]


def test_a_lightning_data_module_gives_the_batches_of_its_loaders() -> None:
    data = built_data(Sequences, 3)
    assert data.splits == ("train", "val")
    assert (data.calls, data.num_classes) == (["prepare_data", "fit"], 2)
    again = built_data(Sequences, 3).split("val")
    held_out = split_of("key", data, "val", is_streamed=True)
    batch = BatchFetcher(held_out, seed=0)[0, 0, torch.arange(3)]
    inputs, targets = next(iter(data.val_dataloader()[0]))
    assert [*batch] == ["input", "target", "index"]
    assert torch.equal(batch["input"], inputs)
    assert torch.equal(batch["target"], targets)
    assert torch.equal(BatchFetcher(again, seed=0)[0, 0, torch.arange(3)]["input"], inputs)
    stream = Stream(data.split("train"))
    assert (stream.batch_size, stream.num_batches) == (4, 5)
    epoch = torch.cat([stream.next()["target"] for _ in range(5)])
    assert sorted(epoch.tolist()) == [*range(20)]
    assert epoch.tolist() != [*range(20)]
    assert Stream(data.split("train"), 7).next()["target"].shape == (7,)
    few = LimitedData(data, 6).split("train")
    assert len(few) == 6
    assert len(Stream(few).next()["input"]) == 4


class Pairs(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.full((2,), float(number)), number) for number in range(4))


def test_an_iterable_split_streams_and_is_not_evaluated() -> None:
    data = UserData(Data(Pairs()), seed=0)
    stream = Stream(split_of("stream.split", data, "train", is_streamed=True), 3)
    batch = stream.next()
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input": [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], "target": [0, 1, 2],
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"evaluate.splits=train: found .*needs a length; an IterableDataset works"):
        split_of("evaluate.splits", data, "train")
