"""Data objects of the user's, as streams see them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from mlotool.config.user_data import NamedSamples, UserData, built_data
from mlotool.data import InMemoryTensors
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
