"""An endless, resumable stream of batches."""

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, get_worker_info

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import RunError
from mlotool.core.user_code import UserCodeError, explained
from mlotool.problem.batch_share import Share, bounds, sliced
from mlotool.problem.samples import check_stream, collated, read_batch, read_sample, whole


class SizedDataset(Protocol):
    """A map-style dataset.

    It may also have `__getitems__(indices)` that returns a whole batch, already collated, and may ask for a seed of
    its own by `seeded = True` (`__getitems__(indices, seed=...)`).
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class Stream:
    """Batches without end, shuffled anew each epoch; its whole state is `(epoch, batches_consumed)`.

    The order of an epoch and the random numbers of a sample depend on `(seed, epoch, index)` alone, so the batches
    are the same after a resume and with any number of workers.

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
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        repeat: int = 1,
    ) -> None:
        given = {"batch_size": batch_size, "seed": seed, "num_workers": num_workers, "repeat": repeat}
        check_stream(dataset, shuffle=shuffle, drop_last=drop_last, **given)
        self.dataset = dataset
        self.batch_size = min(batch_size, len(dataset))
        self.num_batches = len(dataset) // self.batch_size
        if not drop_last and len(dataset) % self.batch_size:
            self.num_batches += 1
        self._fetcher = _Fetcher(dataset, seed)
        self._shuffle = shuffle
        self._num_workers = num_workers
        self._repeat = repeat
        self._times_given = repeat
        self._device = torch.device("cpu")
        self._dtype: torch.dtype | None = None
        self._epoch = 0
        self._batches_consumed = 0
        self._order: tuple[int, Tensor] | None = None
        self._loader: Iterator[Any] | None = None
        self._ahead: Any = None
        self._last: Any = None

    def next(self) -> Any:
        """Return the next batch."""
        if self._times_given < self._repeat:
            self._times_given += 1
            return self.last()
        batch = self.peek()
        self._epoch, number = self._position()
        self._batches_consumed = number + 1
        self._last, self._ahead, self._times_given = batch, None, 1
        return batch

    def peek(self) -> Any:
        """Return the batch that `next` will return; the stream stays where it is."""
        if self._times_given < self._repeat:
            return self.last()
        if self._ahead is None:
            self._ahead = self._move(self._load(*self._position()))
        return self._ahead

    def last(self) -> Any:
        """Return the batch that `next` returned last; before the first, the one it will return."""
        if self._last is None:
            if self._batches_consumed == 0:
                return self.peek()
            self._last = self._move(self._fetcher[self._key(self._epoch, self._batches_consumed - 1)])
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
        earlier, times_last = self._earlier(count)
        batches = []
        for epoch, number, times in earlier:
            batches += [self._move(self._fetcher[self._key(epoch, number)])] * times
        return [*batches, *[self.last()] * times_last]

    def recent_numbers(self, count: int) -> list[int | None]:
        """Return the positions of these batches in their epochs; None where each epoch has other batches."""
        earlier, times_last = self._earlier(count)
        numbers = [number for _, number, times in earlier for _ in range(times)]
        return [*(None if self._shuffle else number for number in numbers), *[self.last_number] * times_last]

    def divide(self, rank: int, num_ranks: int) -> "Stream":
        """Deliver a rank's share of each batch from now on; `batch_size` and the order stay those of all ranks.

        A share that is smaller or larger than the others' comes as a `Share`, with its weight.

        Args:
            rank: which one this is.
            num_ranks: how many there are.
        """
        is_right = is_whole(rank, 0) and is_whole(num_ranks, 1) and rank < num_ranks
        require(is_right, "Stream.divide", (rank, num_ranks), "a rank from 0 on, and more ranks than that")
        self._fetcher.rank, self._fetcher.num_ranks = rank, num_ranks
        self._ahead = self._last = self._loader = None
        return self

    def to(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "Stream":
        """Deliver batches on `device`, floating-point tensors as `dtype` (None leaves theirs)."""
        is_right = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        require(is_right, "Stream.to.dtype", dtype, "a floating-point dtype or null", "Write dtype=torch.float32.")
        try:
            self._device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            require(False, "Stream.to.device", device, "'cpu', 'cuda' or a torch.device", f"torch says: {error}")
        self._dtype = dtype
        self._ahead = self._last = self._loader = None
        return self

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
        is_right = is_right and state["batches_consumed"] <= size
        expected = f"a position: an epoch from 0 on, and batches_consumed from 0 to {size}"
        require(is_right, "Stream.state", state, expected, "Give what state_dict() of such a stream has returned.")
        self._epoch, self._batches_consumed = state["epoch"], state["batches_consumed"]
        self._times_given = state.get("times_given", self._repeat)
        self._order = self._loader = self._ahead = self._last = None

    def _earlier(self, count: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return, of the last `count` draws, (epoch, number, times) of the batches before the last one; its times."""
        found, missing, back = [], count - min(self._times_given, count), 2
        while missing > 0:
            epochs, number = divmod(self._batches_consumed - back, self.num_batches)
            if self._epoch + epochs < 0:
                break
            times = min(self._repeat, missing)
            found.append((self._epoch + epochs, number, times))
            missing, back = missing - times, back + 1
        return found[::-1], min(self._times_given, count)

    def _position(self) -> tuple[int, int]:
        """Return epoch and number of the batch that comes next."""
        if self._batches_consumed == self.num_batches:
            return self._epoch + 1, 0
        return self._epoch, self._batches_consumed

    def _load(self, epoch: int, number: int) -> Any:
        try:
            return self._loaded(epoch, number)
        except MemoryError as error:
            raise RunError(
                f"Loading a batch of {self.batch_size} samples of {type(self.dataset).__name__} needs more memory than "
                f"there is ({_first_line(error)}); expected room for it. Lower the stream's batch_size or num_workers, "
                "or data.sizes."
            ) from error
        except RuntimeError as error:
            # torch's own words, for there is no class of its own.
            if not str(error).startswith("DataLoader worker"):
                raise
            name = type(whole(self.dataset)).__name__
            raise RunError(
                f"A process that loads {name} was ended from outside ({_first_line(error)}); "
                "expected it to last as long as the run. It often had no memory left: lower the stream's num_workers, "
                "or set it to 0; then go on with resume=auto."
            ) from error

    def _loaded(self, epoch: int, number: int) -> Any:
        if self._num_workers == 0:
            return self._fetcher[self._key(epoch, number)]
        if self._loader is None or number == 0:
            keys = [self._key(epoch, later) for later in range(number, self.num_batches)]
            self._loader = iter(
                DataLoader(
                    self._fetcher,  # type: ignore[arg-type]
                    sampler=keys,
                    batch_size=None,
                    num_workers=self._num_workers,
                    collate_fn=_as_is,
                    # Its own: a loader draws a base seed, and must not take it from the generator of the training.
                    generator=torch.Generator(),
                )
            )
        batch = next(self._loader)
        if isinstance(batch, _Failure):
            raise UserCodeError(batch.text)
        return batch

    def _key(self, epoch: int, number: int) -> tuple[int, int, Tensor]:
        start = number * self.batch_size
        return epoch, number, self._epoch_order(epoch)[start : start + self.batch_size]

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_mix(self._fetcher.seed, epoch))
            size = len(self.dataset)
            self._order = epoch, torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        return self._order[1]

    def _move(self, batch: Any) -> Any:
        if self._device.type == "cpu" and self._dtype is None:
            return batch
        return _to_device(batch, self._device, self._dtype)


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


class _Fetcher:
    """Makes a batch from `(epoch, number, indices)`; picklable, so that workers can."""

    def __init__(self, dataset: SizedDataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.rank, self.num_ranks = 0, 1

    def __getitem__(self, key: tuple[int, int, Tensor]) -> Any:
        if get_worker_info() is None:
            return self._part(key)
        try:
            return self._part(key)
        except KeyboardInterrupt:
            raise
        # As torch sends it, an Exception is its traceback as one text, and anything else ends the process unsaid.
        except BaseException as error:
            return _Failure(explained(error) or f"A loader of data failed: {type(error).__name__}: {error}")

    def _part(self, key: tuple[int, int, Tensor]) -> Any:
        if self.num_ranks == 1:
            return self._fetch(*key)
        epoch, number, indices = key
        begin, end, weight = bounds(len(indices), self.rank, self.num_ranks)
        if getattr(self.dataset, "seeded", False):
            # Its random numbers are drawn for the whole batch.
            batch = sliced(self._fetch(epoch, number, indices), begin, end)
        else:
            batch = self._fetch(epoch, number, indices[begin:end])
        return batch if weight == 1.0 else Share(batch, weight)

    def _fetch(self, epoch: int, number: int, indices: Tensor) -> Any:
        if isinstance(self.dataset, Tensor):
            return self.dataset[indices]
        # A Subset has `__getitems__` too, but returns a list of samples.
        if hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, Subset):
            is_seeded = getattr(self.dataset, "seeded", False)
            seed = {"seed": _mix(self.seed, epoch, number)} if is_seeded else {}
            return read_batch(self.dataset, indices, **seed)
        samples, epoch_seed = [], _mix(self.seed, epoch)
        with torch.random.fork_rng(devices=[]):
            for index in indices.tolist():
                # Not torch.manual_seed, which would seed the devices as well.
                torch.default_generator.manual_seed(_mixed(epoch_seed, index))
                samples.append(read_sample(self.dataset, index))
        return collated(self.dataset, samples)


@dataclass(frozen=True)
class _Failure:
    """What a loading process sends in the place of a batch that it could not make."""

    text: str


def _mix(*numbers: int) -> int:
    """Return one seed for several numbers, the same in every process."""
    return random.Random("/".join(map(str, numbers))).getrandbits(63)


def _mixed(seed: int, index: int) -> int:
    """Return a sample's seed from that of its epoch, at a twentieth of what `_mix` costs.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators: SplitMix64.
    """
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


def _as_is(batch: Any) -> Any:
    return batch


def _to_device(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _to_device(value, device, dtype) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it calls __init__, which may take other arguments than the fields.
        moved = copy.copy(batch)
        for each in fields(batch):
            object.__setattr__(moved, each.name, _to_device(getattr(batch, each.name), device, dtype))
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device, dtype) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return type(batch)(_to_device(value, device, dtype) for value in batch)  # type: ignore[call-arg]
    return batch


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
