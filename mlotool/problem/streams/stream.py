"""An endless, resumable stream of batches."""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import RunError
from mlotool.core.plain_state import MAX_COUNT
from mlotool.core.settings import Count, Whole, checked
from mlotool.core.unchanged import is_unchanged
from mlotool.problem.streams.batches import (
    BatchFetcher,
    BatchKey,
    Collate,
    LoaderSamples,
    Share,
    check_dataset,
    is_iterable,
    mixed_seed,
)
from mlotool.problem.streams.iterable import IterableBatches, IterableReader
from mlotool.problem.streams.samplers import as_indices, check_sampler, drawn_order, shuffles
from mlotool.problem.streams.workers import LoadAhead

# An epoch, and the number of a batch in it.
BatchPlace = tuple[int, int]


class Reads(Protocol):
    """Gives batches to several streams that have the very same samples."""

    def read(self, stream: "Stream", place: BatchPlace, load: Callable[[], Any]) -> Any:
        """Return the batch at `place` for one of them, by `load` where it is not at hand."""


_BATCH_SIZE = 100


@dataclass(frozen=True)
class _Choices:
    """What was chosen of a stream's order and sizes; None where nothing was.

    Args:
        workers: further settings of a loader's workers.
        has_batches: the data set gives batches.
        batch_size: as the others an argument of `Stream`.
    """

    batch_size: int | None
    shuffle: bool | None
    drop_last: bool | None
    num_workers: int | None
    sampler: Any
    batch_sampler: Any
    has_batches: bool = False
    workers: Mapping[str, Any] = field(default_factory=dict)

    def beside(self, samples: LoaderSamples) -> "_Choices":
        """Return them with those of a loader in the place of what was not chosen."""
        loader = samples.loader
        chosen = replace(
            self,
            num_workers=loader.num_workers if self.num_workers is None else self.num_workers,
            workers={name: getattr(loader, name) for name in _OF_WORKERS},
        )
        if is_iterable(samples.dataset):
            drop_last = loader.drop_last if self.drop_last is None else self.drop_last
            has_batches = self.batch_size is None and loader.batch_size is None
            return replace(
                chosen, batch_size=self.batch_size or loader.batch_size, drop_last=drop_last, has_batches=has_batches
            )
        if self.sampler is not None or self.batch_sampler is not None:
            return chosen
        batches: Any = loader.batch_sampler
        if batches is None:
            advice = "Give the loader a batch_size, or a batch_sampler."
            require(False, "stream.batch_size", loader.batch_size, "a loader that makes batches", advice)
        if type(batches) is not BatchSampler:
            return replace(chosen, batch_sampler=batches)
        is_shuffled = shuffles(batches.sampler, len(samples.loader.dataset))  # type: ignore[arg-type]
        if is_shuffled and self.shuffle is None and loader.generator is not None:
            what = (
                "stream: found a loader with a generator, which is not used: the stream's seed sets the order of epochs"
            )
            advice = "Choose another order by Stream(loader, seed=1)."
            warnings.warn(f"{what}, so that a resume repeats it. {advice}", stacklevel=5)
        return replace(
            chosen,
            batch_size=self.batch_size or batches.batch_size,
            drop_last=batches.drop_last if self.drop_last is None else self.drop_last,
            shuffle=is_shuffled if self.shuffle is None else self.shuffle,
            sampler=batches.sampler if is_shuffled is None else None,
        )

    def check(self, *, is_iterable: bool) -> None:
        """Refuse what excludes each other, and samplers that are none."""
        if is_iterable:
            given = [name for name in ("sampler", "batch_sampler") if getattr(self, name) is not None]
            given += ["shuffle"] if self.shuffle else []
            expected = "none with a data set that is read in its own order"
            require(not given, "stream", given, expected, "Shuffle in the data set itself, by a buffer.")
            return
        others = {"batch_sampler": ("sampler", "batch_size", "shuffle", "drop_last"), "sampler": ("shuffle",)}
        for kind, names in others.items():
            sampler = getattr(self, kind)
            if sampler is not None:
                check_sampler(f"stream.{kind}", sampler)
                given = [name for name in names if getattr(self, name) is not None]
                require(not given, f"stream.{kind}", sampler, f"none with {given}", "Leave one of them out.")


# Of a loader, what its worker processes are made by.
_OF_WORKERS = ("worker_init_fn", "multiprocessing_context", "prefetch_factor")


@checked
class Stream:
    """Endless batches, shuffled anew each epoch; the whole state of a stream is `(epoch, batches_consumed)`.

    The batches are the same after a resume and with any number of workers: the order of an epoch depends only on
    `(seed, epoch)`, and the random numbers that a sample draws from the global generators of torch, numpy and Python
    only on `(seed, epoch, index)`. Reading a sample leaves these generators as they were. What a `collate_fn` draws
    depends on the number of the batch; a sampler draws the order of a whole epoch at once.

    From a DataLoader, the stream takes the data set and each argument that is None here: batch size, sampler,
    `drop_last`, `num_workers` and `collate_fn`. If the loader has the usual sampler, one that its `shuffle` argument
    makes, the stream's own order replaces it.

    An IterableDataset is read in its own order, once per epoch. To resume in the middle of an epoch, the stream reads
    the epoch's first batches again, unless the data set has `state_dict` and `load_state_dict`. Its batches depend on
    the number of workers, as with a DataLoader. Its random numbers depend on the number of the batch.

    Args:
        dataset: map-style data set, IterableDataset or DataLoader.
        batch_size: samples per batch; None: that of the DataLoader, or 100.
        seed: seed of the order and of random transforms.
        shuffle: whether each epoch has a new order; None: as in the DataLoader, or true.
        drop_last: whether the last batch of an epoch is left out if it is smaller than the others (unless it is the
            only batch); None: as in the DataLoader, or true.
        num_workers: processes that load batches ahead; 0 loads in this process; None: as in the DataLoader, or 0.
        repeat: how many times in a row each batch is returned.
        collate_fn: makes a batch from a list of samples; None: that of the DataLoader, or torch's default.
        sampler: yields the indices of an epoch, in place of `shuffle`.
        batch_sampler: yields the list of indices of each batch, in place of `batch_size`, `shuffle` and `drop_last`.

    Raises:
        ConfigError: an argument is wrong, or two of them exclude each other.

    Example:
        >>> stream = Stream(torch.arange(4), batch_size=2, shuffle=False)
        >>> stream.next(), stream.next(), stream.state_dict()
        (tensor([0, 1]), tensor([2, 3]), {'epoch': 0, 'batches_consumed': 2})
        >>> loader = DataLoader(["a", "bcd"], batch_size=2, collate_fn=lambda texts: max(map(len, texts)))
        >>> Stream(loader).next()
        3
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: Count | None = None,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        num_workers: Whole | None = None,
        repeat: Count = 1,
        collate_fn: Collate | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
    ) -> None:
        samples: Any = LoaderSamples(dataset) if isinstance(dataset, DataLoader) else dataset
        chosen = _Choices(batch_size, shuffle, drop_last, num_workers, sampler, batch_sampler)
        if isinstance(samples, LoaderSamples):
            chosen = chosen.beside(samples)
            if chosen.sampler is not None or chosen.batch_sampler is not None:
                # Its indices are those of the whole.
                samples = LoaderSamples(samples.loader, names_pairs=samples.names_pairs)
        self._fetcher = BatchFetcher(samples, seed, collate_fn)
        self.dataset: Any = self._fetcher.dataset
        is_sequential = is_iterable(self.dataset)
        if not is_sequential:
            check_dataset(self.dataset, has_collate=self._fetcher.collate_fn is not None)
        chosen.check(is_iterable=is_sequential)
        size = chosen.batch_size or _BATCH_SIZE
        is_in_order = not is_sequential and chosen.sampler is None
        self.batch_size = min(size, len(self.dataset)) if is_in_order else size
        self._shuffle, self._drop_last = chosen.shuffle is not False, chosen.drop_last is not False
        self._sampler, self._batch_sampler = chosen.sampler, chosen.batch_sampler
        self._num_workers, self._of_workers = chosen.num_workers or 0, chosen.workers
        self._reader: IterableReader | None = None
        if is_sequential:
            own_size = None if chosen.has_batches else self.batch_size
            batches = IterableBatches(self._fetcher, own_size, self._drop_last)
            self._reader = IterableReader(batches, self._num_workers, self._of_workers)
        # The same in each epoch, where the stream itself draws the order.
        is_fixed = not is_sequential and not self._has_sampler
        self._fixed_num_batches = self._num_batches_of(len(self.dataset)) if is_fixed else None
        self._repeat = self._times_given = repeat
        self._device = torch.device("cpu")
        self._dtype: torch.dtype | None = None
        self._epoch = self._batches_consumed = 0
        # By epoch, of the last two that were asked for: the positions of its samples, or those of each batch.
        self._orders: dict[int, Any] = {}
        # What worker processes load ahead, and the place of the batch that they hand out next.
        self._loader: LoadAhead | None = None
        self._loader_place = (0, 0)
        self._shared: Reads | None = None
        self._ahead: Any = None
        self._last: Any = None

    @property
    def num_batches(self) -> int:
        """Number of batches of the current epoch; an IterableDataset may have to be read to count them."""
        return self._num_batches(self._epoch)

    @property
    def has_ready_batches(self) -> bool:
        """Whether the data set itself returns whole batches, which cannot be divided among ranks."""
        return self._reader is not None and self._reader.source.batch_size is None

    @property
    def code(self) -> tuple[Any, ...]:
        """The user's sampler, `collate_fn` and the like, which draw the order and make the batches."""
        parts = (self._fetcher.collate_fn, self._sampler, self._batch_sampler)
        return tuple(part for part in parts if part is not None)

    def next(self) -> Any:
        """Return the next batch."""
        if self._times_given < self._repeat:
            self._times_given += 1
            return self.last()
        batch = self.peek()
        self._advance()
        return batch

    def draw(self) -> BatchPlace:
        """Advance as `next` does, but without loading the batch; return the batch's place.

        The caller loads the batch itself; `last` loads it on demand.
        """
        if self._times_given < self._repeat:
            self._times_given += 1
        else:
            self._advance()
        return self._epoch, self._batches_consumed - 1

    @property
    def next_place(self) -> BatchPlace:
        """Epoch and number of the batch that `next` will return."""
        return self.last_place if self._times_given < self._repeat else self._position()

    @property
    def last_place(self) -> BatchPlace:
        """Epoch and number of the batch that `last` returns."""
        return self._position() if self._batches_consumed == 0 else (self._epoch, self._batches_consumed - 1)

    def peek(self) -> Any:
        """Return the batch that `next` will return; the stream stays where it is."""
        if self._times_given < self._repeat:
            return self.last()
        if self._ahead is None:
            place = self._position()
            load = partial(self._loaded, place)
            self._ahead = load() if self._shared is None else self._shared.read(self, place, load)
        return self._ahead

    def last(self) -> Any:
        """Return the batch that `next` returned last; before the first, the one it will return."""
        if self._last is None:
            if self._batches_consumed == 0:
                return self.peek()
            self._last = self.moved(self._read(self._epoch, self._batches_consumed - 1))
        return self._last

    @property
    def last_number(self) -> int | None:
        """Position in the epoch of the batch that `last` returns; None where each epoch has other batches."""
        return None if self._has_other_epochs else max(self._batches_consumed - 1, 0)

    def num_seen_every(self, num_draws: int) -> int:
        """Return how many different batches of an epoch are among every `num_draws`-th batch that `next` returns."""
        total = self.num_batches * self._repeat
        return min(self.num_batches, total // math.gcd(num_draws, total))

    def recent(self, count: int) -> list[Any]:
        """Return the last `count` batches, the newest last; fewer where fewer were drawn."""
        if self._reader is not None:
            self._reader.keep(count)
        places = self._recent_places(count)
        batches = {
            place: self.last() if place == self.last_place else self.moved(self._read(*place))
            for place in dict.fromkeys(places)
        }
        return [batches[place] for place in places]

    def recent_numbers(self, count: int) -> list[int | None]:
        """Return the positions in their epochs of the last `count` batches; None where each epoch has other batches."""
        return [None if self._has_other_epochs else number for _, number in self._recent_places(count)]

    def is_repeatable(self) -> bool:
        """Return whether the next sample, and the order of a sampler, repeat when read with the same random numbers.

        The sample is read in the process that reads batches, since a data set may open its files in the first process
        that asks. An IterableDataset is not read a second time.
        """
        if self._reader is not None:
            return True
        if self._has_sampler and not is_unchanged(self._draw(0), self._draw(0)):
            return False
        if self._fetcher.draws_nothing:
            return True
        epoch, number, indices = self._key(*self.next_place)
        key = epoch, number, indices[:1]
        if self._num_workers == 0:
            first, again = (self._fetcher[key] for _ in range(2))
        else:
            loader = self._load_ahead([key, key], 1)
            first, again = next(loader), next(loader)
            loader.close()
        return is_unchanged(Share.opened(first)[0], Share.opened(again)[0])

    def divide(self, rank: int, num_ranks: int) -> "Stream":
        """Return only one rank's share of each batch from now on; `batch_size` and the order stay those of all ranks.

        A share that is smaller or larger than those of the other ranks is returned as a `Share`, with its weight.

        Args:
            rank: the number of this rank.
            num_ranks: how many ranks there are.
        """
        self._fetcher.rank, self._fetcher.num_ranks = rank, num_ranks
        if self._reader is not None:
            self._reader.forget()
        self._ahead = self._last = self._loader = None
        return self

    def to(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "Stream":
        """Return batches on `device` from now on, floating-point tensors as `dtype` (None keeps their dtype)."""
        is_right = dtype is None or dtype.is_floating_point
        require(is_right, "Stream.to.dtype", dtype, "a floating-point dtype or null", "Write dtype=torch.float32.")
        self._device, self._dtype = torch.device(device), dtype
        self._ahead = self._last = self._loader = None
        return self

    def read_through(self, reads: Reads | None) -> None:
        """Take batches from `reads` from now on, which several streams may share; None: the stream reads its own."""
        self._shared = reads

    def moved(self, batch: Any) -> Any:
        """Return a batch, which was loaded elsewhere, on this stream's device and in this stream's dtype."""
        if self._device.type == "cpu" and self._dtype is None:
            return batch
        return _to_device(batch, self._device, self._dtype)

    def indices(self, epoch: int, number: int) -> Tensor:
        """Return the positions of a batch's samples in the data set, (b,) int64; not of an IterableDataset."""
        if epoch not in self._orders:
            if len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = self._draw(epoch)
        order = self._orders[epoch]
        return order[number] if self._batch_sampler is not None else order[self._stretch(number)]

    @property
    def is_read_by_position(self) -> bool:
        """Whether this process reads the batches itself, whole, and as the data set gives them."""
        return self._num_workers == 0 and self._fetcher.num_ranks == 1 and self._fetcher.collate_fn is None

    def loads_like(self, other: "Stream") -> bool:
        """Say whether two streams give the very same samples, on the same device, at the same place."""
        if self._reader is not None or other._reader is not None:
            return self is other
        return self.dataset is other.dataset and self._settings() == other._settings()

    def moves_like(self, other: "Stream") -> bool:
        """Say whether the batches of two streams come on the same device and in the same dtype."""
        return (self._device, self._dtype) == (other._device, other._dtype)

    def copy(self) -> "Stream":
        """Return a copy at the same position, which advances independently."""
        twin = copy.copy(self)
        # Workers of this one's would hand the batches that they load ahead to either.
        twin._loader, twin._num_workers = None, 0
        return twin

    def position(self) -> dict[str, int]:
        """Return the stream's position."""
        return self.state_dict()

    def at(self, position: Mapping[str, int]) -> "Stream":
        """Return a copy of the stream at `position`."""
        twin = self.copy()
        twin.load_state_dict(position)
        return twin

    def state_dict(self) -> dict[str, int]:
        """Return the position, and for an IterableDataset that has a `state_dict` also its state."""
        state: dict[str, Any] = {"epoch": self._epoch, "batches_consumed": self._batches_consumed}
        if self._repeat > 1:
            state["times_given"] = self._times_given
        return state if self._reader is None else state | self._reader.state(self._epoch, self._batches_consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        keys = ("epoch", "batches_consumed")
        is_right = isinstance(state, Mapping) and all(is_whole(state.get(key), 0) for key in keys)
        is_right = is_right and all(state[key] < MAX_COUNT for key in keys)
        # How many an iterable data set has shows when it is read.
        is_counted = is_right and self._reader is None
        size = self._num_batches(state["epoch"] if is_counted else self._epoch) if self._reader is None else MAX_COUNT
        is_right = is_right and state["batches_consumed"] <= size
        is_right = is_right and is_whole(state.get("times_given", 1), 1) and state.get("times_given", 1) <= self._repeat
        expected = f"a position: an epoch from 0 on, and batches_consumed from 0 to {size}"
        require(is_right, "Stream.state", state, expected, "Give what state_dict() of such a stream has returned.")
        if self._reader is not None:
            self._reader.load_state(state["epoch"], state["batches_consumed"], state)
        self._epoch, self._batches_consumed = state["epoch"], state["batches_consumed"]
        self._times_given = state.get("times_given", self._repeat)
        self._orders, self._loader, self._ahead, self._last = {}, None, None, None

    def _recent_places(self, count: int) -> list[BatchPlace]:
        place = self._before(self._epoch, self._batches_consumed)
        # Before the first draw it is the batch that comes.
        places = [(0, 0)] if place is None else [place] * self._times_given
        while place is not None and len(places) < count:
            place = self._before(*place)
            places += [] if place is None else [place] * self._repeat
        return places[:count][::-1]

    def _before(self, epoch: int, number: int) -> BatchPlace | None:
        """Return the place before one; None before the first."""
        if number > 0:
            return epoch, number - 1
        return None if epoch == 0 else (epoch - 1, self._num_batches(epoch - 1) - 1)

    def _num_batches(self, epoch: int) -> int:
        if self._fixed_num_batches is not None:
            return self._fixed_num_batches
        if self._reader is not None:
            return self._reader.num_batches(epoch)
        self.indices(epoch, 0)
        size = len(self._orders[epoch])
        return size if self._batch_sampler is not None else self._num_batches_of(size)

    def _num_batches_of(self, num_samples: int) -> int:
        num_whole, rest = divmod(num_samples, self.batch_size)
        return num_whole if num_whole and (self._drop_last or not rest) else num_whole + 1

    @property
    def _has_sampler(self) -> bool:
        return self._sampler is not None or self._batch_sampler is not None

    @property
    def _has_other_epochs(self) -> bool:
        return self._shuffle or self._has_sampler or self._reader is not None

    def _draw(self, epoch: int) -> Any:
        """Return the positions of an epoch's samples in their order, (n,) int64; of a batch sampler one a batch."""
        seed, size = self._fetcher.seed, len(self.dataset)
        if self._batch_sampler is not None:
            key = "stream.batch_sampler"
            return [as_indices(key, batch) for batch in drawn_order(key, self._batch_sampler, seed, epoch, size)]
        if self._sampler is not None:
            return as_indices("stream.sampler", drawn_order("stream.sampler", self._sampler, seed, epoch, size))
        generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        return torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)

    def _advance(self) -> None:
        self._epoch, number = self._position()
        self._batches_consumed = number + 1
        self._last, self._ahead, self._times_given = self._ahead, None, 1

    def _settings(self) -> tuple[Any, ...]:
        fetcher, transfer = self._fetcher, (self._device, self._dtype)
        sizes = self.batch_size, self._drop_last if self._has_sampler else self.num_batches
        ranks = fetcher.rank, fetcher.num_ranks
        return fetcher.seed, ranks, sizes, self._shuffle, transfer, self.code, fetcher.names_pairs

    def _position(self) -> BatchPlace:
        """Return epoch and number of the batch that comes next."""
        epoch, number = self._epoch, self._batches_consumed
        if self._fixed_num_batches is not None:
            has_more = number < self._fixed_num_batches
        elif self._reader is not None:
            has_more = self._reader.has(epoch, number)
        else:
            has_more = number < self._num_batches(epoch)
        return (epoch, number) if has_more else (epoch + 1, 0)

    def _read(self, epoch: int, number: int) -> Any:
        """Return a batch, which this process reads, if it is not one of an IterableDataset."""
        if self._reader is not None:
            return self._reader.read(epoch, number)
        return self._fetcher[self._key(epoch, number)]

    def _loaded(self, place: BatchPlace) -> Any:
        if self._num_workers == 0 or self._reader is not None:
            return self.moved(self._read(*place))
        epoch, number = place
        for is_last in (False, True):
            # They are at another place where batches in between were read elsewhere.
            if self._loader is None or place != self._loader_place:
                keys = [self._key(epoch, later) for later in range(number, self._num_batches(epoch))]
                self._loader = self._load_ahead(keys, self._num_workers)
            try:
                batch = next(self._loader)
                break
            except Exception as error:
                # Now: the garbage collector frees the objects of the error together, and then its processes would wait
                # five seconds each for a word from a queue that is gone.
                self._loader.close()
                self._loader = None
                if is_last or type(error) is not RunError:
                    raise
                warnings.warn(f"{error} Another process loads the same samples.", stacklevel=2)
        self._loader_place = epoch, number + 1
        return self.moved(batch)

    def _load_ahead(self, keys: Sequence[BatchKey], num_workers: int) -> LoadAhead:
        return LoadAhead(self._fetcher, keys, num_workers, mixed_seed(self._fetcher.seed, keys[0][0]), self._of_workers)

    def _key(self, epoch: int, number: int) -> BatchKey:
        return epoch, number, self.indices(epoch, number)

    def _stretch(self, number: int) -> slice:
        return slice(number * self.batch_size, (number + 1) * self.batch_size)


def _to_device(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a batch with its tensors on `device`, those of floating-point numbers as `dtype` (None leaves theirs)."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _to_device(value, device, dtype) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it calls __init__, which may take other arguments than the fields.
        moved = copy.copy(batch)
        for part in fields(batch):
            object.__setattr__(moved, part.name, _to_device(getattr(batch, part.name), device, dtype))
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device, dtype) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return type(batch)(_to_device(value, device, dtype) for value in batch)  # type: ignore[call-arg]
    return batch


class SameBatch:
    """A stream whose next batch is always the last batch of another stream.

    For a problem that has to see the same batch as another one, such as the two problems of a few-shot task.

    Args:
        stream: the other stream.

    Raises:
        ConfigError: `stream` is not a Stream.

    Example:
        >>> support = Stream(torch.arange(4), batch_size=2, shuffle=False)
        >>> query = SameBatch(support)
        >>> support.next(), query.next()
        (tensor([0, 1]), tensor([0, 1]))
    """

    def __init__(self, stream: Stream) -> None:
        require(isinstance(stream, Stream), "SameBatch.stream", stream, "a Stream", "Write SameBatch(Stream(...)).")
        self._stream = stream

    @property
    def stream(self) -> Stream:
        """The other stream."""
        return self._stream

    def next(self) -> Any:
        """Return the other stream's last batch."""
        return self._stream.last()

    peek = last = next

    @property
    def last_number(self) -> int | None:
        """Position in the epoch of the other stream's last batch."""
        return self._stream.last_number

    def recent(self, count: int) -> list[Any]:
        """Return the other stream's last `count` batches."""
        return self._stream.recent(count)

    def recent_numbers(self, count: int) -> list[int | None]:
        """Return the positions of these batches."""
        return self._stream.recent_numbers(count)

    def divide(self, rank: int, num_ranks: int) -> "SameBatch":
        """Return the stream itself: the other stream divides its batches."""
        return self

    def to(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "SameBatch":
        """Return the stream itself: the other stream sets device and dtype."""
        return self

    def copy(self) -> "SameBatch":
        """Return a copy at the same position."""
        return SameBatch(self._stream.copy())

    def position(self) -> dict[str, int]:
        """Return the other stream's position."""
        return self._stream.position()

    def at(self, position: Mapping[str, int]) -> "SameBatch":
        """Return a copy whose other stream is at `position`."""
        return SameBatch(self._stream.at(position))

    def state_dict(self) -> dict[str, int]:
        """Return nothing: the other stream keeps the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing: the other stream keeps the position."""
