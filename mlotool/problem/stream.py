"""An endless, resumable stream of batches."""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import RunError
from mlotool.core.plain_state import MAX_COUNT
from mlotool.core.settings import Count, Whole, checked
from mlotool.core.unchanged import is_unchanged
from mlotool.core.user_code import UserCodeError, explained
from mlotool.problem.batches import BatchFetcher, BatchKey, Share, SizedDataset, check_dataset, mixed_seed


class LoadAhead:
    """The batches of `keys`, in their order, which worker processes load ahead; the processes end with it.

    Args:
        fetcher: reads them.
        keys: of the batches.
        num_workers: processes.
    """

    def __init__(self, fetcher: BatchFetcher, keys: Sequence[BatchKey], num_workers: int) -> None:
        loader: DataLoader[Any] = DataLoader(
            _FailureAsValue(fetcher),  # type: ignore[arg-type]
            sampler=keys,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_is,
            # Its own: a loader draws the seeds of its workers, and must not take them from that of the training.
            generator=torch.Generator().manual_seed(mixed_seed(fetcher.seed, keys[0][0])),
        )
        batches: Any = iter(loader)
        self._batches = batches
        # Torch would raise the end of a worker wherever this process is, while it writes a checkpoint too. `next` looks
        # for it as well.
        _remove_worker_pids(id(self._batches))
        batches._worker_pids_set = False

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            UserCodeError: a worker could not read it.
            RunError: a worker was ended from outside.
        """
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            advice = "Lower the stream's num_workers, if it had no memory left, and go on with resume=auto."
            fault = f"A process that loads data has ended ({error}); expected it to last as long as the run."
            raise RunError(f"{fault} {advice}") from error
        if isinstance(batch, _Failure):
            raise UserCodeError(batch.text)
        return batch

    def close(self) -> None:
        """End the workers."""
        self._batches._shutdown_workers()

    def __del__(self) -> None:
        if hasattr(self, "_batches"):
            self.close()


@dataclass(frozen=True)
class _Failure:
    """What a worker sends in the place of a batch that it could not read."""

    text: str


@dataclass(frozen=True)
class _FailureAsValue:
    """A fetcher whose errors come back as values: of an exception torch would send the traceback's text alone."""

    fetcher: BatchFetcher

    def __getitem__(self, key: BatchKey) -> Any:
        try:
            return self.fetcher[key]
        except KeyboardInterrupt:
            raise
        # Anything that is no Exception (SystemExit) would end the worker without a word.
        except BaseException as error:
            return _Failure(explained(error) or f"A loader of data failed: {type(error).__name__}: {error}")


def _as_is(batch: Any) -> Any:
    return batch


# An epoch, and the number of a batch in it.
BatchPlace = tuple[int, int]


class Reads(Protocol):
    """Gives batches to several streams that have the very same samples."""

    def read(self, stream: "Stream", place: BatchPlace, load: Callable[[], Any]) -> Any:
        """Return the batch at `place` for one of them, by `load` where it is not at hand."""


@checked
class Stream:
    """Batches without end, shuffled anew each epoch; its whole state is `(epoch, batches_consumed)`.

    The order of an epoch, and what a sample draws from the global generators of torch, numpy and Python, depend on
    `(seed, epoch, index)` alone, so the batches are the same after a resume and with any number of workers. Outside of
    the samples these generators are as if nothing had been drawn.

    Args:
        dataset: map-style dataset.
        batch_size: samples a batch.
        seed: of the order and of random transforms.
        shuffle: a new order each epoch.
        drop_last: leave out an epoch's last batch if it is smaller (unless it is the only one).
        num_workers: processes that load ahead; 0 loads in this one.
        repeat: times that each batch is given in a row.

    Example:
        >>> stream = Stream(torch.arange(4), batch_size=2, shuffle=False)
        >>> stream.next(), stream.next(), stream.state_dict()
        (tensor([0, 1]), tensor([2, 3]), {'epoch': 0, 'batches_consumed': 2})
    """

    def __init__(
        self,
        dataset: SizedDataset,
        batch_size: Count,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: Whole = 0,
        repeat: Count = 1,
    ) -> None:
        check_dataset(dataset)
        self.dataset = dataset
        self.batch_size = min(batch_size, len(dataset))
        self.num_batches = len(dataset) // self.batch_size
        if not drop_last and len(dataset) % self.batch_size:
            self.num_batches += 1
        self._fetcher, self._shuffle, self._num_workers = BatchFetcher(dataset, seed), shuffle, num_workers
        self._repeat = self._times_given = repeat
        self._device = torch.device("cpu")
        self._dtype: torch.dtype | None = None
        self._epoch = self._batches_consumed = 0
        self._order: tuple[int, Tensor] | None = None
        # What worker processes load ahead, and the place of the batch that they hand out next.
        self._loader: LoadAhead | None = None
        self._loader_place = (0, 0)
        self._shared: Reads | None = None
        self._ahead: Any = None
        self._last: Any = None

    def next(self) -> Any:
        """Return the next batch."""
        if self._times_given < self._repeat:
            self._times_given += 1
            return self.last()
        batch = self.peek()
        self._advance()
        return batch

    def draw(self) -> BatchPlace:
        """Go on as `next` does without loading the batch, for a caller who loads it itself; return its place.

        `last` loads it where it is asked for.
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
            self._last = self.moved(self._fetcher[self._key(self._epoch, self._batches_consumed - 1)])
        return self._last

    @property
    def last_number(self) -> int | None:
        """Position in the epoch of the batch that `last` returns; None where each epoch has other batches."""
        return None if self._shuffle else max(self._batches_consumed - 1, 0)

    def num_seen_every(self, num_draws: int) -> int:
        """Return how many batches of an epoch one meets who looks at each `num_draws`-th that `next` returns."""
        total = self.num_batches * self._repeat
        return min(self.num_batches, total // math.gcd(num_draws, total))

    def recent(self, count: int) -> list[Any]:
        """Return the last `count` batches, the newest last; fewer where fewer were drawn."""
        places = self._recent_places(count)
        batches = {
            place: self.last() if place == self.last_place else self.moved(self._fetcher[self._key(*place)])
            for place in dict.fromkeys(places)
        }
        return [batches[place] for place in places]

    def recent_numbers(self, count: int) -> list[int | None]:
        """Return the positions of these batches in their epochs; None where each epoch has other batches."""
        return [None if self._shuffle else number for _, number in self._recent_places(count)]

    def is_repeatable(self) -> bool:
        """Say whether the next sample, read twice with the same random numbers, is the same one.

        It is read where batches are read, since a data set may open its files in the first process that asks.
        """
        if self._fetcher.draws_nothing:
            return True
        epoch, number, indices = self._key(*self.next_place)
        key = epoch, number, indices[:1]
        if self._num_workers == 0:
            first, again = (self._fetcher[key] for _ in range(2))
        else:
            loader = LoadAhead(self._fetcher, [key, key], 1)
            first, again = next(loader), next(loader)
            loader.close()
        return is_unchanged(Share.opened(first)[0], Share.opened(again)[0])

    def divide(self, rank: int, num_ranks: int) -> "Stream":
        """Deliver a rank's share of each batch from now on; `batch_size` and the order stay those of all ranks.

        A share that is smaller or larger than the others' comes as a `Share`, with its weight.

        Args:
            rank: which one this is.
            num_ranks: how many there are.
        """
        self._fetcher.rank, self._fetcher.num_ranks = rank, num_ranks
        self._ahead = self._last = self._loader = None
        return self

    def to(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "Stream":
        """Deliver batches on `device`, floating-point tensors as `dtype` (None leaves theirs)."""
        is_right = dtype is None or dtype.is_floating_point
        require(is_right, "Stream.to.dtype", dtype, "a floating-point dtype or null", "Write dtype=torch.float32.")
        self._device, self._dtype = torch.device(device), dtype
        self._ahead = self._last = self._loader = None
        return self

    def read_through(self, reads: Reads | None) -> None:
        """Let `reads` give the batches from now on, which several streams may share; None: the stream reads itself."""
        self._shared = reads

    def moved(self, batch: Any) -> Any:
        """Return a batch that was loaded elsewhere on this stream's device and in its dtype."""
        if self._device.type == "cpu" and self._dtype is None:
            return batch
        return _to_device(batch, self._device, self._dtype)

    def order(self, epoch: int) -> Tensor:
        """Return the positions of the samples in the data set, (n,) int64, in the order of an epoch."""
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self._fetcher.seed, epoch))
            size = len(self.dataset)
            self._order = epoch, torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        return self._order[1]

    @property
    def is_loaded_here(self) -> bool:
        """Whether this process loads the batches itself, and whole: no workers, no share of a rank."""
        return self._num_workers == 0 and self._fetcher.num_ranks == 1

    def loads_like(self, other: "Stream") -> bool:
        """Say whether two streams give the very same samples, on the same device, at the same place."""
        return self.dataset is other.dataset and self._settings() == other._settings()

    def moves_like(self, other: "Stream") -> bool:
        """Say whether the batches of two streams come on the same device and in the same dtype."""
        return (self._device, self._dtype) == (other._device, other._dtype)

    def copy(self) -> "Stream":
        """Return a stream that stands where this one does, and goes on by itself."""
        twin = copy.copy(self)
        # Workers of this one's would hand the batches that they load ahead to either.
        twin._loader, twin._num_workers = None, 0
        return twin

    def position(self) -> dict[str, int]:
        """Return where it stands."""
        return self.state_dict()

    def at(self, position: Mapping[str, int]) -> "Stream":
        """Return a stream that stands at `position`."""
        twin = self.copy()
        twin.load_state_dict(position)
        return twin

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        position = {"epoch": self._epoch, "batches_consumed": self._batches_consumed}
        return position if self._repeat == 1 else {**position, "times_given": self._times_given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position."""
        keys, size = ("epoch", "batches_consumed"), self.num_batches
        is_right = isinstance(state, Mapping) and all(is_whole(state.get(key), 0) for key in keys)
        is_right = is_right and state["batches_consumed"] <= size and state["epoch"] < MAX_COUNT
        is_right = is_right and is_whole(state.get("times_given", 1), 1) and state.get("times_given", 1) <= self._repeat
        expected = f"a position: an epoch from 0 on, and batches_consumed from 0 to {size}"
        require(is_right, "Stream.state", state, expected, "Give what state_dict() of such a stream has returned.")
        self._epoch, self._batches_consumed = state["epoch"], state["batches_consumed"]
        self._times_given = state.get("times_given", self._repeat)
        self._order = self._loader = self._ahead = self._last = None

    def _recent_places(self, count: int) -> list[BatchPlace]:
        num_loaded = self._epoch * self.num_batches + self._batches_consumed
        # Before the first draw it is the batch that comes.
        num_drawn = max((num_loaded - 1) * self._repeat + self._times_given, 1)
        draws = range(max(num_drawn - count, 0), num_drawn)
        return [divmod(draw // self._repeat, self.num_batches) for draw in draws]

    def _advance(self) -> None:
        self._epoch, number = self._position()
        self._batches_consumed = number + 1
        self._last, self._ahead, self._times_given = self._ahead, None, 1

    def _settings(self) -> tuple[Any, ...]:
        fetcher, transfer = self._fetcher, (self._device, self._dtype)
        return fetcher.seed, fetcher.rank, fetcher.num_ranks, self.batch_size, self.num_batches, self._shuffle, transfer

    def _position(self) -> BatchPlace:
        """Return epoch and number of the batch that comes next."""
        if self._batches_consumed == self.num_batches:
            return self._epoch + 1, 0
        return self._epoch, self._batches_consumed

    def _loaded(self, place: BatchPlace) -> Any:
        if self._num_workers == 0:
            return self.moved(self._fetcher[self._key(*place)])
        epoch, number = place
        for is_last in (False, True):
            # They are at another place where batches in between were read elsewhere.
            if self._loader is None or place != self._loader_place:
                keys = [self._key(epoch, later) for later in range(number, self.num_batches)]
                self._loader = LoadAhead(self._fetcher, keys, self._num_workers)
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

    def _key(self, epoch: int, number: int) -> BatchKey:
        start = number * self.batch_size
        return epoch, number, self.order(epoch)[start : start + self.batch_size]


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
    """A stream whose next batch is the one that another stream gave last: for a problem that reads another one's task.

    Args:
        stream: the other one.

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
        """That of the other stream's last batch."""
        return self._stream.last_number

    def recent(self, count: int) -> list[Any]:
        """Return the other stream's last `count` batches."""
        return self._stream.recent(count)

    def recent_numbers(self, count: int) -> list[int | None]:
        """Return the positions of these batches."""
        return self._stream.recent_numbers(count)

    def divide(self, rank: int, num_ranks: int) -> "SameBatch":
        """Leave the shares to the other stream."""
        return self

    def to(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "SameBatch":
        """Leave the device and dtype to the other stream."""
        return self

    def copy(self) -> "SameBatch":
        """Return a stream that stands where this one does."""
        return SameBatch(self._stream.copy())

    def position(self) -> dict[str, int]:
        """Return where the other stream stands."""
        return self._stream.position()

    def at(self, position: Mapping[str, int]) -> "SameBatch":
        """Return a stream whose other one stands at `position`."""
        return SameBatch(self._stream.at(position))

    def state_dict(self) -> dict[str, int]:
        """Return nothing: the other stream keeps the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take nothing back."""
