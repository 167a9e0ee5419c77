"""The samples of one batch: how they are seeded and read, collated, and shared among ranks."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate, default_convert

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.random_stream import own_random
from mlotool.core.user_code import Call, named, noted

_FORM = "a sample at every index, with tensors of one shape, numbers or texts, in dicts or tuples"
_SAME_FORM = (
    "Let __getitem__ return the same form at each index, without gradients; or give a collate_fn, which makes a batch "
    "of samples of different lengths."
)
# What makes a batch of a list of samples.
Collate = Callable[[list[Any]], Any]

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


class LoaderSamples:
    """The samples of a DataLoader, of which batches are made as it makes them.

    Args:
        loader: whose `collate_fn` makes the batches; a stream takes its batch size, sampler and workers as well.
        dataset: the samples, where they are fewer than the loader's; None: the loader's.
        names_pairs: give a batch that is a pair as `{input, target, index}`.

    Example:
        >>> samples = LoaderSamples(DataLoader(["a", "bcd"], collate_fn=lambda texts: max(map(len, texts))))
        >>> BatchFetcher(samples, seed=0)[0, 0, torch.tensor([0, 1])]
        3
    """

    def __init__(self, loader: "DataLoader[Any]", dataset: Any = None, *, names_pairs: bool = False) -> None:
        self.loader, self.names_pairs = loader, names_pairs
        self.dataset: Any = loader.dataset if dataset is None else dataset
        is_torchs = loader.collate_fn in (default_collate, default_convert)
        self.collate_fn: Collate | None = None if is_torchs else loader.collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self.dataset[index]


class BatchFetcher:
    """Reads the samples of one batch; picklable, so that worker processes can do it.

    `fetcher[epoch, number, indices]` is the batch of the samples at `indices`. Each sample's random numbers are seeded
    by the epoch and its index, those of a whole batch and of `collate_fn` by the epoch and the batch's number. With
    several ranks it is this rank's share of that batch.

    Args:
        dataset: map-style dataset, or the samples of a loader.
        seed: of the samples' random numbers.
        collate_fn: makes a batch of a list of samples; None: that of the loader's samples, or `default_collate`.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Collate | None = None) -> None:
        of_loader = isinstance(dataset, LoaderSamples)
        self.dataset = dataset.dataset if of_loader else dataset
        self.collate_fn = dataset.collate_fn if of_loader and collate_fn is None else collate_fn
        self.names_pairs = of_loader and dataset.names_pairs
        self.seed = seed
        self.rank, self.num_ranks = 0, 1
        # Known not to draw from global random numbers, whose seeding would take longer.
        self.draws_nothing = self.collate_fn is None and draws_nothing(self.dataset)

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
        if isinstance(self.dataset, Tensor) and self.collate_fn is None:
            return self.dataset[indices]
        # Ranks that read their shares by themselves draw other random numbers for them.
        seed = mixed_seed(self.seed, epoch, number, *([begin] if begin else []))
        if self._reads_whole_batches:
            batch = self._fetch_whole(indices, seed)
        else:
            batch = self._fetch_samples(epoch, indices, seed)
        return named_pair(batch, indices) if self.names_pairs else batch

    @property
    def _reads_whole_batches(self) -> bool:
        # A Subset has `__getitems__` too, but returns a list of samples. Ours return batches, which nobody collates.
        is_ours = type(self.dataset).__module__.startswith("mlotool.")
        has_batches = hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, Subset)
        return has_batches and not (is_ours and self.collate_fn is not None)

    def _fetch_samples(self, epoch: int, indices: Tensor, seed: int) -> Any:
        if self.draws_nothing:
            return collated(self.dataset, [_read_sample(self.dataset, index) for index in indices.tolist()])
        samples, epoch_seed = [], mixed_seed(self.seed, epoch)
        with own_random() as seeded:
            for index in indices.tolist():
                seeded(_sample_seed(epoch_seed, index))
                samples.append(_read_sample(self.dataset, index))
            if self.collate_fn is not None:
                seeded(seed)
            return collated(self.dataset, samples, self.collate_fn)

    def _fetch_whole(self, indices: Tensor, seed: int) -> Any:
        own = {"seed": seed} if getattr(self.dataset, "seeded", False) else {}
        if self.draws_nothing:
            return _read_batch(self.dataset, indices, None, **own)
        with own_random() as seeded:
            seeded(seed)
            return _read_batch(self.dataset, indices, self.collate_fn, **own)


def draws_nothing(dataset: Any) -> bool:
    """Say whether samples are known not to be drawn from global random numbers: their seeding would take longer."""
    if type(dataset) in (Tensor, TensorDataset, list, tuple):
        return True
    # Ours draw from seeds of their own; some wrap one of the user's.
    inner = getattr(dataset, "dataset", None)
    return type(dataset).__module__.startswith("mlotool.") and (inner is None or draws_nothing(inner))


def mixed_seed(*numbers: int | str) -> int:
    """Return one seed for several numbers or names, the same in every process."""
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


def is_iterable(dataset: Any) -> bool:
    """Say whether a data set can only be read in an order of its own, from its beginning.

    Example:
        >>> class Lines:
        ...     def __iter__(self):
        ...         return iter(["a", "b"])
        >>> is_iterable(Lines()), is_iterable(["a", "b"])
        (True, False)
    """
    if isinstance(dataset, type | str | bytes | DataLoader):
        return False
    # Hugging Face's have a `__getitem__` for columns, and torch's class above them.
    is_plain = hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__") and not hasattr(dataset, "__next__")
    return isinstance(dataset, IterableDataset) or (is_plain and not hasattr(dataset, "__getitem__"))


def check_dataset(dataset: Any, key: str = "stream.dataset", *, has_collate: bool = False) -> None:
    """Refuse what is no map-style data set with samples.

    Args:
        dataset: what was given.
        key: where it stands.
        has_collate: a `collate_fn` makes the batches: a list of tensors of different shapes are samples then.

    Raises:
        ConfigError: it is none.
    """
    advice = "Give one with __len__ and __getitem__, such as torch.utils.data.TensorDataset(inputs, targets)."
    if hasattr(dataset, "__next__"):
        advice = "It can be read once. Give an object whose __iter__ begins anew, such as an IterableDataset."
    elif isinstance(dataset, Mapping) and any(hasattr(value, "features") for value in dataset.values()):
        advice = f"Give one of them, such as the one named {next(iter(dataset))!r}."
    elif is_iterable(dataset):
        advice = "Data to evaluate, or to read by index, needs a length; an IterableDataset works for streams only."
    has_columns = is_columns(dataset) and not (has_collate and isinstance(dataset, list | tuple))
    require(_is_map_style(dataset) and not has_columns, key, dataset, "a map-style data set", advice)
    if len(dataset) == 0:
        raise ConfigError(f"{key}: found 0 samples; expected at least one. Correct the data set's sizes.")


def _is_map_style(value: Any) -> bool:
    if isinstance(value, type | str | bytes | IterableDataset) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    is_numbered = hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    return hasattr(value, "__len__") and is_numbered


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


def _read_batch(dataset: Any, indices: Tensor, collate_fn: Collate | None, **seed: int) -> Any:
    """Return the batch of a data set's `__getitems__`, collated."""
    with noted(lambda: Call("data", dataset, {"indices": indices}, "a batch", "Correct the data set.")):
        batch = dataset.__getitems__(indices, **seed)
    parts = (batch.get("input"), batch.get("target")) if isinstance(batch, Mapping) else (batch,)
    for part in parts:
        if (isinstance(part, list) or (isinstance(part, Tensor) and part.ndim)) and len(part) != len(indices):
            count, whose = f"{len(part)} samples for {len(indices)} indices", f"the __getitems__ of {named(dataset)}"
            raise ConfigError(f"data: found {count} in {whose}; expected one for each, in their order. Correct it.")
    if collate_fn is not None and not isinstance(batch, list):
        fault = f"found a collate_fn, and a {type(batch).__name__} from the __getitems__ of {named(dataset)}"
        raise ConfigError(f"data: {fault}; expected a list of samples. Leave one of the two out.")
    return collated(dataset, batch, collate_fn) if isinstance(batch, list) else batch


def collated(dataset: Any, samples: Sequence[Any], collate_fn: Collate | None = None) -> Any:
    """Return samples as one batch.

    Args:
        dataset: whose samples these are.
        samples: at least one.
        collate_fn: the user's; None: torch's, which gets the rows of Hugging Face's data sets as tensors.
    """

    def call() -> Call:
        what = f"making a batch of {len(samples)} samples of {named(whole(dataset))}"
        return Call("data", what, {"the first": samples[0], "the last": samples[-1]}, _FORM, _SAME_FORM)

    with noted(call):
        if collate_fn is None:
            gives_rows = type(_unwrapped(dataset)).__module__.partition(".")[0] == "datasets"
            return _of_rows(samples) if gives_rows else default_collate(list(samples))
        batch = collate_fn(list(samples))
    # A BatchEncoding, for one: what moves batches, counts and copies them looks into plain dicts.
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def named_pair(batch: Any, indices: Tensor | None = None) -> Any:
    """Return a batch that is a pair as `{input, target}`, with the samples' `index` (b,) where it is known."""
    if type(batch) not in (list, tuple) or len(batch) != 2:
        return batch
    return {"input": batch[0], "target": batch[1], **({} if indices is None else {"index": indices})}


def _unwrapped(dataset: Any) -> Any:
    """Return the data set behind those of torch's and ours that pass its samples on as they are."""
    is_wrapper = isinstance(dataset, Subset) or type(dataset).__module__.startswith("mlotool.")
    inner = getattr(dataset, "dataset", None) if is_wrapper else None
    return dataset if inner is None else _unwrapped(inner)


def _of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows of Python values as columns: numbers, and lists of them that are equally long, as tensors.

    Torch's own would make a list of columns of a list.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: _as_tensor(values) if _is_numbers(values) else default_collate(values) for name, values in columns.items()
    }


def _is_numbers(values: Sequence[Any]) -> bool:
    """Say whether values are Python's numbers, or lists of such at any depth; empty lists are."""
    return all(_is_numbers(value) if isinstance(value, list) else isinstance(value, int | float) for value in values)


def _as_tensor(values: list[Any]) -> Tensor:
    tensor = torch.tensor(values)
    # As Hugging Face's torch format, whatever the default dtype is.
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
