"""Data objects of the user's, as streams see them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from mlotool.config.user_data import NamedSamples, UserData
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
    found = UserData(Data(pairs())).split("train")
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
    found = UserData(Data(dataset)).split("train")
    assert isinstance(found, NamedSamples)
    assert found.dataset is dataset
