"""Worker processes that load batches ahead."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from mlotool.core.errors import RunError
from mlotool.core.user_code import UserCodeError, explained


class LoadAhead:
    """Batches that worker processes load ahead; the processes end with it.

    Args:
        source: has a batch for each of `keys`, or gives batches in an order of its own (an IterableDataset).
        keys: of the batches, in the order in which they are wanted; None for a source with an order of its own.
        num_workers: processes.
        seed: of the workers' random numbers, which the source seeds anew for each batch.
        settings: further arguments of torch's DataLoader, for its workers.
    """

    def __init__(
        self, source: Any, keys: Sequence[Any] | None, num_workers: int, seed: int, settings: Mapping[str, Any]
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            _FailureAsValue(source) if keys is not None else _FailuresAsValues(source),  # type: ignore[arg-type]
            sampler=keys,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_is,
            # Its own: a loader draws the seeds of its workers, and must not take them from that of the training.
            generator=torch.Generator().manual_seed(seed),
            **settings,
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
            StopIteration: there are no more.
            UserCodeError: a worker could not read it.
            RunError: a worker was ended from outside.
        """
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            advice = "If it ran out of memory, lower the stream's num_workers. Then continue with resume=auto."
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

    fetcher: Any

    def __getitem__(self, key: Any) -> Any:
        return _or_failure(lambda: self.fetcher[key])


class _FailuresAsValues(IterableDataset[Any]):
    """The same of a source with an order of its own, which ends with its first error."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.source)
        while (batch := _or_failure(lambda: next(batches, _END))) is not _END:
            yield batch
            if isinstance(batch, _Failure):
                return


_END = object()


def _or_failure(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except KeyboardInterrupt:
        raise
    # Anything that is no Exception (SystemExit) would end the worker without a word.
    except BaseException as error:
        return _Failure(explained(error) or f"A loader of data failed: {type(error).__name__}: {error}")


def _as_is(batch: Any) -> Any:
    return batch
