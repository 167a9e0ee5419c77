"""`debug.limit_samples`: the same data, with few samples in each split."""

from typing import Any

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples, modulo 2^64, are spread evenly and have no period."""


class LimitedData:
    """A data object whose splits are cut down.

    Args:
        data: the whole.
        limit: samples of each split, at most.
    """

    def __init__(self, data: Any, limit: int) -> None:
        self._data = data
        self._limit = limit
        self._splits: dict[str, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what else the whole has: `splits`, `num_classes`, ..."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def split(self, name: str) -> Any:
        """Return one split, cut down."""
        whole = self._data.split(name)
        # One object for a split: by that, streams of several runs know that their samples are the same.
        if name not in self._splits or self._splits[name][0] is not whole:
            self._splits[name] = whole, limited(whole, self._limit)
        return self._splits[name][1]


class LimitedDataset:
    """Samples of a dataset, one out of each of as many equal parts: a split that is sorted by class keeps all of them.

    Which one of its part is taken varies from part to part. Samples at equal distances would be of one class where the
    labels alternate.

    Args:
        dataset: the whole.
        limit: number of samples to keep.
    """

    def __init__(self, dataset: Any, limit: int) -> None:
        self._dataset = dataset
        self._limit = limit

    @property
    def dataset(self) -> Any:
        """The whole, which messages name."""
        return self._dataset

    def __len__(self) -> int:
        return self._limit

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self._dataset[self._place(index)]

    def _place(self, index: int) -> int:
        if not 0 <= index < self._limit:
            raise IndexError(index)
        size, index = len(self._dataset), int(index)
        begin, end = index * size // self._limit, (index + 1) * size // self._limit
        return begin + ((index * _GOLDEN % 2**64) * (end - begin) >> 64)


class LimitedBatchDataset(LimitedDataset):
    """The same of a dataset that hands out whole batches."""

    @property
    def seeded(self) -> bool:
        """Whether `__getitems__` makes use of a seed."""
        return bool(getattr(self._dataset, "seeded", False))

    def __getitems__(self, indices: Any, **options: Any) -> Any:
        """Return a collated batch."""
        return self._dataset.__getitems__([self._place(int(index)) for index in indices], **options)

    def without_augmentation(self) -> "LimitedBatchDataset":
        """Return the same samples as they are."""
        plain = getattr(self._dataset, "without_augmentation", None)
        return self if plain is None else LimitedBatchDataset(plain(), self._limit)


def limited(dataset: Any, limit: int) -> Any:
    """Return a dataset cut down to `limit` samples; as it is where it has no more, or no length, which others tell."""
    try:
        size = len(dataset)
    except (TypeError, ValueError):
        return dataset
    if size <= limit:
        return dataset
    return (LimitedBatchDataset if hasattr(dataset, "__getitems__") else LimitedDataset)(dataset, limit)
