"""Loading batches ahead of time in worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from mlotool.core.errors import RunError
from mlotool.core.user_code import UserCodeError, explained
from mlotool.problem.batch_fetcher import BatchFetcher, BatchKey, SizedDataset, mixed_seed
from mlotool.problem.samples import whole

_SECONDS_TO_END = 0.5


class LostWorkerError(RuntimeError):
    """A process that loads data has ended."""


class LoadAhead:
    """The batches of `keys`, in their order, which worker processes load ahead; the processes end with it.

    Args:
        fetcher: reads them.
        keys: of the batches.
        num_workers: processes.

    Raises:
        UserCodeError: at a batch that a worker could not read.
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
        self._batches, self._workers = batches, list(batches._workers)
        # Torch would raise the end of a worker wherever this process is, while it writes a checkpoint too. `next` looks
        # for it as well.
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            LostWorkerError: a worker has ended by itself, or by another's hand.
        """
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            # What a worker has sent lies in its own memory, and may be gone before the worker is known to be.
            for worker in self._workers:
                worker.join(_SECONDS_TO_END)
            codes = [worker.exitcode for worker in self._workers if worker.exitcode is not None]
            if not codes:
                raise
            raise LostWorkerError(f"exit code {codes[0]}") from error
        if isinstance(batch, _Failure):
            raise UserCodeError(batch.text)
        return batch

    def close(self) -> None:
        """End the workers."""
        # Torch asks them to end, waits, and sends SIGTERM; for one that takes no notice Python would wait for ever.
        self._batches._shutdown_workers()
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self.close()


def loading_error(error: Exception, dataset: SizedDataset, batch_size: int) -> RunError | None:
    """Return what to raise where a batch could not be loaded for want of memory; None if `error` is something else."""
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    if isinstance(error, MemoryError):
        return RunError(
            f"Loading a batch of {batch_size} samples of {type(dataset).__name__} needs more memory than "
            f"there is ({reason}); expected room for it. Lower the stream's batch_size or num_workers, "
            "or data.sizes."
        )
    if isinstance(error, LostWorkerError):
        return RunError(
            f"A process that loads {type(whole(dataset)).__name__} was ended from outside, and so was the one that "
            f"took its place ({reason}); expected it to last as long as the run. It often had no memory left: lower "
            "the stream's num_workers, or set it to 0; then go on with resume=auto."
        )
    return None


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
