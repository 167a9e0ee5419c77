"""Reading the samples of one batch."""

import random
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from mlotool.core.random_stream import own_random
from mlotool.problem.batches import Share, bounds, sliced
from mlotool.problem.samples import collated, read_batch, read_sample

BatchKey = tuple[int, int, Tensor]
"""An epoch, the number of a batch in it, and the indices of the batch's samples."""


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
        if draws_nothing(self.dataset):
            return collated(self.dataset, [read_sample(self.dataset, index) for index in indices.tolist()])
        samples, epoch_seed = [], mixed_seed(self.seed, epoch)
        with own_random() as seeded:
            for index in indices.tolist():
                seeded(_sample_seed(epoch_seed, index))
                samples.append(read_sample(self.dataset, index))
        return collated(self.dataset, samples)

    def _fetch_whole(self, indices: Tensor, seed: int) -> Any:
        own = {"seed": seed} if getattr(self.dataset, "seeded", False) else {}
        if draws_nothing(self.dataset):
            return read_batch(self.dataset, indices, **own)
        with own_random() as seeded:
            seeded(seed)
            return read_batch(self.dataset, indices, **own)


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
