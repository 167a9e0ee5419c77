"""Batches of evaluations that several runs of one process go through, each read once."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mlotool.fusion.copied import copied, num_bytes

MAX_BYTES = 2**28
"""Of the batches of a group that are kept; those that find no room are read again by each run."""


class Room:
    """The memory that is left for batches that are kept.

    Args:
        num_bytes: of all of them.
    """

    def __init__(self, num_bytes: int = MAX_BYTES) -> None:
        self._num_left = num_bytes

    def takes(self, batch: Any) -> bool:
        """Say whether there is room for a batch, which then has taken it."""
        size = num_bytes(batch)
        if size > self._num_left:
            return False
        self._num_left -= size
        return True


class KeptData:
    """A data object whose batches are kept once they were read, for runs that evaluate the same splits.

    Each caller gets a copy, which on a CPU takes memory once someone writes to it. Data sets without whole batches,
    and those that augment, are handed on as they are.

    Args:
        data: the whole; what else it has stays (`splits`, `num_classes`, ...).
        room: for the batches.

    Attributes:
        num_readers: runs that read it; nothing is kept for one alone.
    """

    def __init__(self, data: Any, room: Room) -> None:
        self._data = data
        self._room = room
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
        """Say whether a batch is to be kept."""
        return self.num_readers > 1 and self._room.takes(batch)


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
