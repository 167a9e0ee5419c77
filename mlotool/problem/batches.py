"""The samples of one batch: how they are seeded and read, collated, and shared among ranks."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.random_stream import own_random
from mlotool.core.user_code import Call, named, noted

_FORM = "a sample at every index, with tensors of one shape, numbers or texts, in dicts or tuples"
_SAME_FORM = "Let __getitem__ return the same form at each index, without gradients."

# An epoch, the number of a batch in it, and the indices of the batch's samples.
BatchKey = tuple[int, int, Tensor]


class SizedDataset(Protocol):
    """A map-style dataset.

    It may also have `__getitems__(indices)` that returns a whole batch, already collated, and may ask for a seed of
    its own by `seeded = True` (`__getitems__(indices, seed=...)`).

    What it draws from the global generators of torch, numpy and Python is fixed by the stream's seed, the epoch and the
    sample's index (with `__getitems__`: the batch's number). A generator of its own is fixed where it is made from the
    sample's seed: `np.random.default_rng(torch.initial_seed())`.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class BatchFetcher:
    """Reads the samples of one batch; picklable, so that worker processes can do it.

    `fetcher[epoch, number, indices]` is the batch of the samples at `indices`. Each sample's random numbers are seeded
    by the epoch and its index, those of a whole batch by the epoch and the batch's number. With several ranks it is
    this rank's share of that batch.

    Args:
        dataset: map-style dataset.
        seed: of the samples' random numbers.
    """

    def __init__(self, dataset: SizedDataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.rank, self.num_ranks = 0, 1
        # Known not to draw from global random numbers, whose seeding would take longer.
        self.draws_nothing = draws_nothing(dataset)

    def __getitem__(self, key: BatchKey) -> Any:
        if self.num_ranks == 1:
            return self._fetch(*key)
        epoch, number, indices = key
        begin, end, weight = bounds(len(indices), self.rank, self.num_ranks)
        if getattr(self.dataset, "seeded", False):
            # Its random numbers are drawn for the whole batch.
            batch = sliced(self._fetch(epoch, number, indices), begin, end)
        else:
            batch = self._fetch(epoch, number, indices[begin:end], begin)
        return batch if weight == 1.0 else Share(batch, weight)

    def _fetch(self, epoch: int, number: int, indices: Tensor, begin: int = 0) -> Any:
        if isinstance(self.dataset, Tensor):
            return self.dataset[indices]
        # A Subset has `__getitems__` too, but returns a list of samples.
        if hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, Subset):
            # Ranks that read their shares by themselves draw other random numbers for them.
            return self._fetch_whole(indices, mixed_seed(self.seed, epoch, number, *([begin] if begin else [])))
        if self.draws_nothing:
            return _collated(self.dataset, [_read_sample(self.dataset, index) for index in indices.tolist()])
        samples, epoch_seed = [], mixed_seed(self.seed, epoch)
        with own_random() as seeded:
            for index in indices.tolist():
                seeded(_sample_seed(epoch_seed, index))
                samples.append(_read_sample(self.dataset, index))
        return _collated(self.dataset, samples)

    def _fetch_whole(self, indices: Tensor, seed: int) -> Any:
        own = {"seed": seed} if getattr(self.dataset, "seeded", False) else {}
        if self.draws_nothing:
            return _read_batch(self.dataset, indices, **own)
        with own_random() as seeded:
            seeded(seed)
            return _read_batch(self.dataset, indices, **own)


def draws_nothing(dataset: Any) -> bool:
    """Say whether samples are known not to be drawn from global random numbers: their seeding would take longer."""
    if type(dataset) in (Tensor, TensorDataset, list, tuple):
        return True
    # Ours draw from seeds of their own; some wrap one of the user's.
    inner = getattr(dataset, "dataset", None)
    return type(dataset).__module__.startswith("mlotool.") and (inner is None or draws_nothing(inner))


def mixed_seed(*numbers: int) -> int:
    """Return one seed for several numbers, the same in every process."""
    return random.Random("/".join(map(str, numbers))).getrandbits(63)


def _sample_seed(seed: int, index: int) -> int:
    """Return a sample's seed from that of its epoch, at a twentieth of what `mixed_seed` costs.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators: SplitMix64.
    """
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


@dataclass(frozen=True)
class Share:
    """A batch that is not a rank's equal share of the global one.

    Where ranks have n_r of N samples, the mean over R ranks of `weight * C_r`, with `weight = n_r R / N`, is the loss
    of the joined batch, if C is a mean over samples; so are the means of all its derivatives.

    Args:
        batch: this rank's samples.
        weight: of their loss; 1 is an equal share.
    """

    batch: Any
    weight: float

    @staticmethod
    def opened(batch: Any) -> tuple[Any, float]:
        """Return the samples of a batch and their weight, which is 1 where it is no Share."""
        return (batch.batch, batch.weight) if isinstance(batch, Share) else (batch, 1.0)

    @staticmethod
    def weigh(output: LossOutput, weight: float) -> LossOutput:
        """Return a loss and its metrics times a weight."""
        return LossOutput(output.loss * weight, lambda: {name: x * weight for name, x in output.metrics.items()})


def bounds(size: int, rank: int, num_ranks: int) -> tuple[int, int, float]:
    """Return where a rank's part of `size` samples begins and ends, and its weight.

    Of fewer samples than ranks some ranks get the first one with weight 0: a loss needs a sample.

    Example:
        >>> [bounds(5, rank, 2) for rank in range(2)], bounds(1, 0, 2)
        ([(0, 2, 0.8), (2, 5, 1.2)], (0, 1, 0.0))
    """
    begin, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
    weight = (end - begin) * num_ranks / size
    return (begin, end, weight) if end > begin else (0, 1, 0.0)


def sliced(batch: Any, begin: int, end: int) -> Any:
    """Return the samples from `begin` to `end` of a collated batch."""
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return {key: sliced(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple):
        parts = [sliced(value, begin, end) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, Sequence):
        return batch[begin:end]
    fault = f"A batch of {type(batch).__name__} cannot be divided among ranks; expected tensors in dicts or lists."
    raise TypeError(f"{fault} Use runner.devices=1, or a data set that is not `seeded`.")


def check_dataset(dataset: Any, key: str = "stream.dataset") -> None:
    """Refuse what is no map-style data set with samples.

    Args:
        dataset: what was given.
        key: where it stands.

    Raises:
        ConfigError: it is none.
    """
    advice = "Give one with __len__ and __getitem__, such as torch.utils.data.TensorDataset(inputs, targets)."
    if isinstance(dataset, DataLoader):
        advice = "Give its data set: Stream(loader.dataset, batch_size=32)."
    require(_is_map_style(dataset), key, dataset, "a map-style data set", advice)
    if len(dataset) == 0:
        raise ConfigError(f"{key}: found 0 samples; expected at least one. Correct the data set's sizes.")


def _is_map_style(value: Any) -> bool:
    if isinstance(value, type | str | bytes | IterableDataset) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    is_numbered = hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    return hasattr(value, "__len__") and is_numbered and not is_columns(value)


def is_columns(value: Any) -> bool:
    """Say whether a value holds columns, such as `(inputs, targets)`, in the place of samples.

    Example:
        >>> import torch
        >>> is_columns((torch.zeros(4, 2), torch.zeros(4))), is_columns([torch.zeros(2), torch.zeros(2)])
        (True, False)
    """
    if isinstance(value, Mapping):
        return 0 not in value
    shapes = [tuple(part.shape) for part in value if hasattr(part, "shape")] if type(value) in (list, tuple) else []
    return len(shapes) == len(value) and len(set(shapes)) > 1 if shapes else False


def whole(dataset: Any) -> Any:
    """Return the data set that another one gives in another form: a Subset's, for one."""
    inner = getattr(dataset, "dataset", None)
    return dataset if inner is None else whole(inner)


def _read_sample(dataset: Any, index: int) -> Any:
    with noted(lambda: Call("data", whole(dataset), {"index": index}, "a sample", "Correct it, or its files.")):
        return dataset[index]


def _read_batch(dataset: Any, indices: Any, **seed: int) -> Any:
    """Return the batch of a data set's `__getitems__`, collated."""
    with noted(lambda: Call("data", dataset, {"indices": indices}, "a batch", "Correct the data set.")):
        batch = dataset.__getitems__(indices, **seed)
    parts = (batch.get("input"), batch.get("target")) if isinstance(batch, Mapping) else (batch,)
    for part in parts:
        if (isinstance(part, list) or (isinstance(part, Tensor) and part.ndim)) and len(part) != len(indices):
            count, whose = f"{len(part)} samples for {len(indices)} indices", f"the __getitems__ of {named(dataset)}"
            raise ConfigError(f"data: found {count} in {whose}; expected one for each, in their order. Correct it.")
    return _collated(dataset, batch) if isinstance(batch, list) else batch


def _collated(dataset: Any, samples: Sequence[Any]) -> Any:
    """Return samples as one batch."""

    def call() -> Call:
        what = f"making a batch of {len(samples)} samples of {named(whole(dataset))}"
        return Call("data", what, {"the first": samples[0], "the last": samples[-1]}, _FORM, _SAME_FORM)

    with noted(call):
        return default_collate(list(samples))
