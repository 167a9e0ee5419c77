"""Loading batches ahead of time in worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from mlotool.core.errors import RunError
from mlotool.core.user_code import UserCodeError, explained
from mlotool.problem.batch_fetcher import BatchFetcher, BatchKey, SizedDataset, mixed_seed
from mlotool.problem.samples import whole


def load_ahead(fetcher: BatchFetcher, keys: Sequence[BatchKey], num_workers: int) -> Iterator[Any]:
    """Return the batches of `keys`, in their order, which worker processes load ahead.

    Raises:
        UserCodeError: at a batch that a worker could not read.
    """
    loader: DataLoader[Any] = DataLoader(
        _FailureAsValue(fetcher),  # type: ignore[arg-type]
        sampler=keys,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_is,
        # Its own: a loader draws the seeds of its workers, and must not take them from the generator of the training.
        generator=torch.Generator().manual_seed(mixed_seed(fetcher.seed, keys[0][0])),
    )
    return map(_opened, loader)


def loading_error(error: Exception, dataset: SizedDataset, batch_size: int) -> RunError | None:
    """Return what to raise where a batch could not be loaded for want of memory; None if `error` is something else."""
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    if isinstance(error, MemoryError):
        return RunError(
            f"Loading a batch of {batch_size} samples of {type(dataset).__name__} needs more memory than "
            f"there is ({reason}); expected room for it. Lower the stream's batch_size or num_workers, "
            "or data.sizes."
        )
    # torch's own words, for there is no class of its own.
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return RunError(
            f"A process that loads {type(whole(dataset)).__name__} was ended from outside ({reason}); "
            "expected it to last as long as the run. It often had no memory left: lower the stream's num_workers, "
            "or set it to 0; then go on with resume=auto."
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


def _opened(batch: Any) -> Any:
    if isinstance(batch, _Failure):
        raise UserCodeError(batch.text)
    return batch


def _as_is(batch: Any) -> Any:
    return batch
