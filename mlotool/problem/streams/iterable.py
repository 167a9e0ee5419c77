"""Batches of a data set that can only be read in an order of its own, such as an IterableDataset."""

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.random_stream import own_random
from mlotool.core.user_code import Call, named, noted
from mlotool.problem.streams.batches import BatchFetcher, Share, bounds, collated, mixed_seed, named_pair
from mlotool.problem.streams.workers import LoadAhead


class IterableBatches(IterableDataset[Any]):
    """The batches of one epoch; picklable, so that worker processes can read them.

    Before each batch torch's, numpy's and Python's global generators are seeded by the epoch and the batch's number (in
    a worker that is not the first one, also by the worker's). `set_epoch` of the data set is called where it has one.

    Args:
        fetcher: has the data set, the seed, how batches are made, and whose share of them comes; each rank reads all
            samples.
        batch_size: samples per batch; None: the data set gives batches.
        drop_last: leave out an epoch's last batch if it is smaller (unless it is the only one).

    Attributes:
        epoch: that is read next.
    """

    def __init__(self, fetcher: BatchFetcher, batch_size: int | None, drop_last: bool) -> None:
        self.fetcher, self.batch_size, self.drop_last = fetcher, batch_size, drop_last
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return self.of_epoch()

    def of_epoch(self, begin: int = 0) -> Iterator[Any]:
        """Yield the batches of the epoch; the first one has the number `begin`, where the data set was put there."""
        worker = get_worker_info()
        of_worker = [worker.id] if worker is not None and worker.id else []
        dataset, size = self.fetcher.dataset, self.batch_size or 1
        samples: Any = None
        for number in count(begin):
            with own_random() as seeded, noted(self._call):
                seeded(mixed_seed(self.fetcher.seed, self.epoch, number, *of_worker))
                if samples is None:
                    if hasattr(dataset, "set_epoch"):
                        dataset.set_epoch(self.epoch)
                    samples = iter(dataset)
                chunk = list(islice(samples, size))
                if not chunk or (len(chunk) < size and self.drop_last and number):
                    return
                batch = self._batch(chunk)
            yield batch

    def _batch(self, samples: list[Any]) -> Any:
        fetcher = self.fetcher
        if self.batch_size is None:
            assert fetcher.num_ranks == 1
            batch, weight = samples[0] if fetcher.collate_fn is None else fetcher.collate_fn(samples[0]), 1.0
        else:
            begin, end, weight = bounds(len(samples), fetcher.rank, fetcher.num_ranks)
            batch = collated(fetcher.dataset, samples[begin:end], fetcher.collate_fn)
        batch = named_pair(batch) if fetcher.names_pairs else batch
        return batch if weight == 1.0 else Share(batch, weight)

    def _call(self) -> Call:
        given = {"epoch": self.epoch}
        return Call("data", self.fetcher.dataset, given, "samples, one after the other", "Correct its __iter__.")


# An epoch, and a number of batches in it.
Place = tuple[int, int]


class IterableReader:
    """Reads batches by their places, which costs nothing in their order; going back reads an epoch from its beginning.

    A data set with `state_dict` and `load_state_dict`, read in this process, is put where a state says. Another one is
    read from the beginning of its epoch up to the batch that is wanted.

    Args:
        source: reads an epoch.
        num_workers: processes that load ahead; 0 reads in this one.
        settings: of the workers, as for `LoadAhead`.
    """

    def __init__(self, source: IterableBatches, num_workers: int, settings: Mapping[str, Any]) -> None:
        self.source, self._num_workers, self._settings = source, num_workers, settings
        self._dataset = source.fetcher.dataset
        names = ("state_dict", "load_state_dict")
        self._has_state = num_workers == 0 and all(hasattr(self._dataset, name) for name in names)
        # The last batches, each with the data set's state behind it; and how many of them are kept.
        self._kept: dict[Place, tuple[Any, Any]] = {}
        self._num_kept = 2
        # Batches of the epochs that were read to their end.
        self._sizes: dict[int, int] = {}
        self._batches: Any = None
        self._next: Place = (0, 0)
        # The data set's states that were loaded, and its own before everything.
        self._saved: dict[Place, Any] = {}
        self._first_state: Any = None

    def read(self, epoch: int, number: int) -> Any:
        """Return a batch; None behind the last one of its epoch.

        Raises:
            ConfigError: the epoch has no batch.
        """
        if (epoch, number) not in self._kept:
            if number >= self._sizes.get(epoch, number + 1):
                return None
            is_ahead = self._next[0] == epoch and self._saved_before(epoch, number) <= self._next[1] <= number
            if self._batches is None or not is_ahead:
                self._open(epoch, number)
            while self._next[1] <= number:
                if not self._read_on():
                    return None
        return self._kept[epoch, number][0]

    def has(self, epoch: int, number: int) -> bool:
        """Say whether an epoch has a batch of this number; it is read for that.

        Raises:
            ConfigError: the epoch has fewer batches than were read of it before.
        """
        if self.read(epoch, number) is not None:
            return True
        found, whose = self._sizes[epoch], named(self._dataset)
        expected = f"the {number} that were read before, as each __iter__ of an epoch has to give the same samples"
        advice = "Begin anew, or give the data set state_dict and load_state_dict."
        require(found >= number, f"data: batches in epoch {epoch} of {whose}", found, expected, advice)
        return False

    def num_batches(self, epoch: int) -> int:
        """Return how many batches an epoch has, which has to be read to its end for that, if it was not."""
        while epoch not in self._sizes:
            self.read(epoch, self._next[1] if self._next[0] == epoch else 0)
        return self._sizes[epoch]

    def keep(self, num_batches: int) -> None:
        """Keep as many of the last batches from now on, and one that is read ahead."""
        self._num_kept = max(self._num_kept, num_batches + 1)

    def state(self, epoch: int, number: int) -> dict[str, Any]:
        """Return what is saved of a place: the data set's state there where it is known, the number of workers."""
        if (epoch, number - 1) in self._kept:
            own = self._kept[epoch, number - 1][1]
        else:
            own = self._saved.get((epoch, number))
        state = {} if own is None else {"dataset": own}
        return state | ({"num_workers": self._num_workers} if self._num_workers > 1 else {})

    def load_state(self, epoch: int, number: int, state: Mapping[str, Any]) -> None:
        """Take what `state` has returned.

        Raises:
            ConfigError: another number of workers reads other batches.
        """
        saved, found = state.get("num_workers", 1), max(self._num_workers, 1)
        reason = "since the batches of an iterable data set depend on the number of workers"
        expected = f"{saved}, as before, {reason}"
        require(found == saved, "stream.num_workers", found, expected, f"Set num_workers={saved}.")
        if self._has_state and state.get("dataset") is not None:
            self._saved[epoch, number] = state["dataset"]

    def forget(self) -> None:
        """Read everything anew."""
        self._close()
        self._kept.clear()

    def _close(self) -> None:
        if isinstance(self._batches, LoadAhead):
            self._batches.close()
        self._batches = None

    def _saved_before(self, epoch: int, number: int) -> int:
        """Return the largest number of batches, up to one, behind which a state of the epoch was loaded; else 0."""
        return max((behind for of, behind in self._saved if of == epoch and behind <= number), default=0)

    def _open(self, epoch: int, number: int) -> None:
        was_at_end = self._batches is None and self._next == (epoch - 1, self._sizes.get(epoch - 1))
        is_in_order = was_at_end or self._first_state is None
        self._close()
        begin = self._saved_before(epoch, number)
        if self._has_state:
            with noted(lambda: Call("data", self._dataset, {}, "its state", "Correct state_dict and load_state_dict.")):
                if self._first_state is None:
                    self._first_state = self._dataset.state_dict()
                if (epoch, begin) in self._saved:
                    self._dataset.load_state_dict(self._saved[epoch, begin])
                elif not is_in_order:
                    self._dataset.load_state_dict(self._first_state)
        self.source.epoch, self._next = epoch, (epoch, begin)
        if self._num_workers:
            seed = mixed_seed(self.source.fetcher.seed, epoch)
            self._batches = LoadAhead(self.source, None, self._num_workers, seed, self._settings)
        else:
            self._batches = self.source.of_epoch(begin)

    def _read_on(self) -> bool:
        """Read the next batch of the epoch; say whether there was one."""
        epoch, number = self._next
        try:
            batch = next(self._batches)
        except StopIteration:
            self._close()
            self._sizes[epoch] = number
            if number == 0:
                fault = f"data: found no batch in epoch {epoch} of {named(self._dataset)}"
                advice = "Let __iter__ begin anew each time that it is called."
                raise ConfigError(f"{fault}; expected at least one in each epoch. {advice}") from None
            return False
        except BaseException:
            self._close()
            raise
        self._kept[self._next] = batch, self._dataset.state_dict() if self._has_state else None
        while len(self._kept) > self._num_kept:
            del self._kept[next(iter(self._kept))]
        self._next = epoch, number + 1
        return True
