"""Data sets in memory that are joined to one, so that one gather reads the batches of several runs."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from mlotool.data.in_memory import InMemoryDataset
from mlotool.data.in_memory_tensors import InMemoryTensors, rows
from mlotool.data.language_data import TextWindows
from mlotool.fusion.stacking import NotJointError

MAX_BYTES = 2**30
"""Of the tensors of different data sets that are joined, which are then in memory twice."""

_KINDS = (Tensor, TensorDataset, InMemoryDataset, InMemoryTensors, TextWindows)


class JoinedData:
    """The samples of several data sets, one after the other; those of one that several runs read are there once.

    A batch is, bit for bit, what the run's own data set returns for its own positions, also where a batch holds these
    (`index`).

    Args:
        dataset: the samples of all.
        begins: where the samples of each run's data set begin in it.
        positions: (n,) int64, the position of each sample in its own data set; None where there is only one.
    """

    def __init__(self, dataset: Any, begins: Sequence[int], positions: Tensor | None) -> None:
        self._dataset = dataset
        self._positions = positions
        self.begins = list(begins)

    @classmethod
    def of(cls, datasets: Sequence[Any], max_bytes: int | None = None) -> "JoinedData | None":
        """Join the data sets of runs; None where that cannot be, or takes too much memory.

        Args:
            datasets: one for each run; several may have the same.
            max_bytes: of the joined tensors, by default MAX_BYTES; nothing is copied where all have the same data set.
        """
        kind = type(datasets[0])
        if kind not in _KINDS or any(type(each) is not kind for each in datasets) or not all(map(_is_plain, datasets)):
            return None
        different = list({id(each): each for each in datasets}.values())
        if len(different) == 1:
            return cls(different[0], [0] * len(datasets), None)
        if sum(_num_bytes(each) for each in different) > (MAX_BYTES if max_bytes is None else max_bytes):
            return None
        try:
            whole = _rebuilt(different)
        except NotJointError:
            return None
        sizes = [len(each) for each in different]
        begins = dict(zip(map(id, different), accumulate(sizes, initial=0), strict=False))
        return cls(whole, [begins[id(each)] for each in datasets], torch.cat([torch.arange(size) for size in sizes]))

    def __getitem__(self, places: Tensor) -> Any:
        """Return the batch of the samples at `places` (b,)."""
        if isinstance(self._dataset, Tensor):
            return rows(self._dataset, places)
        if isinstance(self._dataset, TensorDataset):
            return [rows(tensor, places) for tensor in self._dataset.tensors]
        batch = self._dataset.__getitems__(places)
        if self._positions is not None and "index" in batch:
            batch["index"] = self._positions[places]
        return batch


def _is_plain(dataset: Any) -> bool:
    """Say whether its samples are read by position alone, from tensors in memory."""
    if isinstance(dataset, InMemoryDataset):
        return isinstance(dataset.images, Tensor) and not dataset.seeded
    return all(each.layout == torch.strided for each in _leaves(_columns(dataset)))


def _columns(dataset: Any) -> Any:
    """Return what a data set is made of: tensors by name, possibly nested."""
    if isinstance(dataset, Tensor):
        return dataset
    if isinstance(dataset, TensorDataset):
        return dict(enumerate(dataset.tensors))
    if isinstance(dataset, InMemoryTensors):
        return dataset.values
    if isinstance(dataset, TextWindows):
        return {"tokens": dataset.tokens, "starts": dataset.starts, "domain": dataset.domain}
    assert isinstance(dataset, InMemoryDataset)
    columns = {"images": dataset.images, "target": dataset.target, "extra": dataset.extra}
    return columns if dataset.clean_target is None else {**columns, "clean_target": dataset.clean_target}


def _leaves(columns: Any) -> list[Tensor]:
    return [leaf for each in columns.values() for leaf in _leaves(each)] if isinstance(columns, Mapping) else [columns]


def _num_bytes(dataset: Any) -> int:
    return sum(each.numel() * each.element_size() for each in _leaves(_columns(dataset)))


def _joined(columns: Sequence[Any]) -> Any:
    """Return columns with the samples of all data sets.

    Raises:
        NotJointError: their names, dtypes or the shapes of a sample differ.
    """
    first = columns[0]
    if isinstance(first, Tensor):
        if any(
            (each.shape[1:], each.dtype, each.device) != (first.shape[1:], first.dtype, first.device)
            for each in columns
        ):
            raise NotJointError("The samples differ in shape or dtype.")
        return torch.cat(list(columns))
    if any([*each] != [*first] for each in columns):
        raise NotJointError("The samples differ in their keys.")
    return {name: _joined([each[name] for each in columns]) for name in first}


def _rebuilt(datasets: Sequence[Any]) -> Any:
    """Return one data set of the class of several with the samples of all."""
    first = datasets[0]
    columns = [_columns(each) for each in datasets]
    if isinstance(first, TextWindows):
        if any(each.length != first.length for each in datasets):
            raise NotJointError("The windows differ in length.")
        for each, offset in zip(columns, accumulate((len(each.tokens) for each in datasets), initial=0), strict=False):
            each["starts"] = each["starts"] + offset
    if isinstance(first, InMemoryDataset) and any(each.normalization != first.normalization for each in datasets):
        raise NotJointError("The images differ in their normalization.")
    whole = _joined(columns)
    if isinstance(first, TensorDataset):
        return TensorDataset(*whole.values())
    if isinstance(first, InMemoryTensors):
        return InMemoryTensors(whole)
    if isinstance(first, TextWindows):
        return TextWindows(**whole, length=first.length)
    if isinstance(first, InMemoryDataset):
        return InMemoryDataset(**whole, normalization=first.normalization)
    return whole
