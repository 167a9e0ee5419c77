"""A data set of tensors as they are: numbers, token ids, whole tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


def rows(values: Any, index: Tensor) -> Tensor:
    """Return `values[index]`, which index_select reads up to twenty times as fast where a sample is large.

    Args:
        values: (n, ...) a tensor, or what stands for one (`ImageFiles`).
        index: (b,) int64, positions from 0 on.

    Example:
        >>> import torch
        >>> rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1]))
        tensor([[2.],
                [2.]])
    """
    return values.index_select(0, index) if isinstance(values, Tensor) else values[index]


# n: samples, b: batch


class InMemoryTensors(Dataset[dict[str, Any]]):
    """One split: named tensors with the samples along their first axis, possibly nested in dicts.

    Batches have the same names, and `"index": (b,) int64`, the sample's position in this split.

    Args:
        values: tensors (n, ...), or dicts of such.

    Example:
        >>> dataset = InMemoryTensors({"input": torch.zeros(3, 2), "target": torch.tensor([0, 1, 2])})
        >>> dataset.__getitems__([2, 0])["target"]
        tensor([2, 0])
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        lengths = {len(leaf) for leaf in _leaves(self.values)}
        assert len(lengths) == 1, lengths
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample, without the batch's axis."""
        return _at(self.__getitems__([range(len(self))[index]]), 0)

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Any]:
        """Return a collated batch of the samples at `indices` (b,)."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return {**_rows(self.values, index), "index": index}


def _leaves(values: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for value in values.values() for leaf in (_leaves(value) if isinstance(value, Mapping) else [value])]


def _rows(values: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    return {
        name: _rows(value, index) if isinstance(value, Mapping) else rows(value, index)
        for name, value in values.items()
    }


def _at(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {name: _at(value, index) if isinstance(value, Mapping) else value[index] for name, value in values.items()}
