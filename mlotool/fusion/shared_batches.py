"""Batches that several runs of one process ask for, each read once; none sees what another one writes."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

from mlotool.core.bound_module import lazy_copy
from mlotool.problem.stream import Place, Stream

Item = TypeVar("Item")


def copied(value: Any) -> Any:
    """Return a copy of a batch: its containers anew; large tensors on a CPU take memory once they are written to.

    Args:
        value: tensors without a graph in dicts, lists, tuples and dataclasses; anything else is copied as
            `copy.deepcopy` does.

    Example:
        >>> import torch
        >>> batch = {"input": torch.zeros(2), "name": "a"}
        >>> other = copied(batch)
        >>> other["input"].add_(1.0), batch["input"]
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    return copy.deepcopy(value, {id(tensor): lazy_copy(tensor) for tensor in tensors_in(value)})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def grouped(items: Iterable[Item], is_like: Callable[[Item, Item], bool]) -> list[list[Item]]:
    """Return items that are alike together, each object once; groups of one are left out."""
    groups: list[list[Item]] = []
    for item in {id(item): item for item in items}.values():
        if group := next((group for group in groups if is_like(item, group[0])), None):
            group.append(item)
        else:
            groups.append([item])
    return [group for group in groups if len(group) > 1]


def num_bytes(value: Any) -> int:
    """Return the memory of the tensors of a batch."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


MAX_BYTES = 2**28
"""Of the batches that are kept for those who have not asked yet."""


class SharedReads:
    """The batches of streams that have the very same samples: read for the first that asks, kept for the others.

    Each stream gets a copy, so that a loss that changes its batch in place changes no other run's; on a CPU a copy
    takes memory once someone writes to it. A batch is kept until as many have asked for it as there are streams, or
    until later ones need its room: then whoever comes late reads it again.

    Args:
        num_streams: that give the same samples where they stand at the same place, as `Stream.loads_like` says.
        max_bytes: of the batches that are kept.
    """

    def __init__(self, num_streams: int, max_bytes: int = MAX_BYTES) -> None:
        self._num_streams, self._max_bytes = num_streams, max_bytes
        # By place the batch, its memory, and how many have not asked for it.
        self._kept: dict[Place, tuple[Any, int, int]] = {}

    def read(self, stream: Stream, place: Place, load: Callable[[], Any]) -> Any:
        """Return the batch at `place`.

        Args:
            stream: that asks.
            place: an epoch, and the number of the batch in it.
            load: reads it.
        """
        if place not in self._kept:
            batch = load()
            self._kept[place] = batch, num_bytes(batch), self._num_streams
            # The oldest go, but never the one that was read last.
            while len(self._kept) > 1 and sum(size for _, size, _ in self._kept.values()) > self._max_bytes:
                del self._kept[next(iter(self._kept))]
        batch, size, num_waiting = self._kept.pop(place)
        if num_waiting == 1:
            return batch
        self._kept[place] = batch, size, num_waiting - 1
        return copied(batch)


def share_reads(streams: Iterable[Stream], max_bytes: int = MAX_BYTES) -> list[SharedReads]:
    """Let streams that have the very same samples read each batch once; others stay as they are.

    It pays where the streams stand at the same places at about the same time.

    Args:
        streams: of several runs of this process that train side by side.
        max_bytes: of the batches that are kept, for each set of equal streams.

    Example:
        >>> import torch
        >>> images = torch.rand(4, 2)
        >>> streams = [Stream(images, 2, seed=1) for _ in range(2)]
        >>> reads = share_reads(streams)
        >>> torch.equal(streams[0].next(), streams[1].next()), len(reads)
        (True, 1)
    """
    shared = []
    for group in grouped(streams, Stream.loads_like):
        shared.append(SharedReads(len(group), max_bytes))
        for stream in group:
            stream.read_through(shared[-1])
    return shared


MAX_KEPT_BYTES = 2**28
"""Of the batches of a data object that are kept; those that find no room are read again by each run."""


class KeptData:
    """A data object whose batches are kept once they were read, for runs that evaluate the same splits.

    Each caller gets a copy, which on a CPU takes memory once someone writes to it. Data sets without whole batches,
    and those that augment, are handed on as they are.

    Args:
        data: the whole; what else it has stays (`splits`, `num_classes`, ...).
        max_bytes: of the batches that are kept.

    Attributes:
        num_readers: runs that read it; nothing is kept for one alone.
    """

    def __init__(self, data: Any, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._data = data
        self._num_left = max_bytes
        self._datasets: dict[str, Any] = {}
        self.num_readers = 0

    def __getattr__(self, name: str) -> Any:
        """Return what else the whole has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def split(self, name: str) -> Any:
        """Return one split, whose batches are kept."""
        if name not in self._datasets:
            dataset = self._data.split(name)
            is_fixed = hasattr(dataset, "__getitems__") and not getattr(dataset, "seeded", False)
            self._datasets[name] = _KeptDataset(dataset, self) if is_fixed else dataset
        return self._datasets[name]

    def takes(self, batch: Any) -> bool:
        """Say whether a batch is to be kept, for which there is then less room."""
        size = num_bytes(batch)
        is_kept = self.num_readers > 1 and size <= self._num_left
        self._num_left -= size if is_kept else 0
        return is_kept


class _KeptDataset:
    """A data set of whole batches, each of which is read once.

    Args:
        dataset: the whole.
        data: says whether a batch is to be kept.
    """

    def __init__(self, dataset: Any, data: KeptData) -> None:
        self.dataset = dataset
        self._data = data
        self._kept: dict[tuple[int, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what else it has: `clean_target`, ..."""
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Any:
        """Return a collated batch."""
        key = tuple(indices.tolist() if isinstance(indices, Tensor) else indices)
        if key not in self._kept:
            batch = self.dataset.__getitems__(indices)
            if not self._data.takes(batch):
                return batch
            self._kept[key] = batch
        return copied(self._kept[key])
