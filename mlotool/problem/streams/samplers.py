"""The order of an epoch by a sampler of the user's."""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import ConfigError
from mlotool.core.random_stream import own_random
from mlotool.core.user_code import Call, named, noted
from mlotool.problem.streams.batches import mixed_seed

# An epoch of so many times the samples is taken for one without an end.
_MOST = 1_000


def check_sampler(key: str, sampler: Any) -> None:
    """Refuse what gives no indices, and what gives those of one process of several.

    Raises:
        ConfigError: with the first of them.
    """
    is_right = isinstance(sampler, Iterable) and not hasattr(sampler, "__next__") and not isinstance(sampler, str)
    require(is_right, key, sampler, "a sampler: an object whose __iter__ gives the indices of an epoch")
    for part in _parts(sampler):
        advice = "Leave it out: every rank draws the same order, and takes its share of each batch."
        require(getattr(part, "num_replicas", 1) == 1, f"{key}.num_replicas", part, "a sampler of all samples", advice)


def drawn_order(key: str, sampler: Any, seed: int, epoch: int, num_samples: int) -> list[Any]:
    """Return what a sampler gives in one epoch.

    The global generators of torch, numpy and Python, and those that the sampler and the samplers in it hold, are seeded
    by the seed and the epoch, and `set_epoch` is called where they have one.

    Args:
        key: what the sampler is called.
        sampler: of indices, or of lists of them.
        seed: of the stream.
        epoch: from 0 on.
        num_samples: of the data set.

    Raises:
        ConfigError: it gives nothing, or does not end.
    """
    number, most = mixed_seed(seed, epoch), max(_MOST, _MOST * num_samples)
    call = Call(key, sampler, {"epoch": epoch}, "the indices of an epoch", "Correct the sampler.")
    with noted(lambda: call), own_random() as seeded:
        for position, part in enumerate(_parts(sampler)):
            _seed_generator(part, mixed_seed(seed, epoch, position))
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        seeded(number)
        order = list(islice(sampler, most + 1))
    if len(order) > most:
        advice = "Give one that ends, or an IterableDataset."
        raise ConfigError(f"{key}: found {named(sampler)} without an end; expected an epoch of indices. {advice}")
    require(bool(order), key, sampler, "a sampler with an index in each epoch")
    return order


def as_indices(key: str, values: Any) -> Tensor:
    """Return indices that a sampler gives as a tensor (b,) int64.

    Raises:
        ConfigError: there are none, or they are no whole numbers.
    """
    values = values.tolist() if isinstance(values, Tensor | numpy.ndarray) else values
    is_right = isinstance(values, Iterable) and all(map(is_whole, values := list(values))) and bool(values)
    require(is_right, key, values, "whole numbers, positions in the data set", "Correct the sampler.")
    return torch.tensor(values)


def shuffles(sampler: Any, num_samples: int) -> bool | None:
    """Say whether a loader's sampler, one of its own, shuffles; None where it is another one.

    Example:
        >>> from torch.utils.data import WeightedRandomSampler
        >>> shuffles(RandomSampler(range(4)), 4), shuffles(SequentialSampler(range(4)), 4)
        (True, False)
        >>> shuffles(WeightedRandomSampler([1.0, 3.0], 4), 2) is None
        True
    """
    if type(sampler) is SequentialSampler and len(sampler) == num_samples:
        return False
    is_shuffle = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == num_samples
    return True if is_shuffle else None


def _parts(sampler: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a sampler, the samplers in it, and the generators that they hold."""
    yield sampler
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") and depth else ():
        if isinstance(value, Sampler) or hasattr(value, "set_epoch"):
            yield from _parts(value, depth - 1)
        elif isinstance(value, _GENERATORS):
            yield value


_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


def _seed_generator(part: Any, seed: int) -> None:
    if isinstance(part, torch.Generator):
        part.manual_seed(seed)
    elif isinstance(part, numpy.random.Generator):
        part.bit_generator.state = type(part.bit_generator)(seed).state
    elif isinstance(part, numpy.random.RandomState):
        part.seed(seed & 0xFFFFFFFF)
    elif isinstance(part, random.Random):
        part.seed(seed)
