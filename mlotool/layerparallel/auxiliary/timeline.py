"""What each stage did when, for the first batches."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch


class Timeline:
    """Spans of work of the first batches, in seconds of a clock that all processes share.

    Args:
        num_batches: how many batches are recorded; 0 records nothing and costs nothing.
    """

    def __init__(self, num_batches: int) -> None:
        self.spans: list[dict[str, Any]] = []
        self._num_batches = num_batches
        self._batch = -1
        # A clock that never goes back, set by one that other processes read as well.
        self._offset = time.time() - time.perf_counter()
        self._device = torch.device("cpu")

    @staticmethod
    def joined(spans: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the spans of all processes in order, in seconds since the first one began."""
        every = sorted(chain(*spans), key=lambda span: (span["batch"], span["begin"]))
        start = min((span["begin"] for span in every), default=0.0)
        return [{**span, "begin": span["begin"] - start, "end": span["end"] - start} for span in every]

    @property
    def is_recording(self) -> bool:
        """Whether the batch at hand is recorded."""
        return 0 <= self._batch < self._num_batches

    def begin(self, batch: int, device: torch.device) -> None:
        """Begin a batch, counted from 0."""
        self._batch, self._device = batch, device

    @contextmanager
    def span(self, rank: int, what: str) -> Iterator[None]:
        """Record how long something takes.

        Args:
            rank: of the stage.
            what: forward, backward, communication or auxnet.
        """
        if not self.is_recording:
            yield
            return
        begin = self._now()
        yield
        self.spans.append({"rank": rank, "batch": self._batch, "what": what, "begin": begin, "end": self._now()})

    def _now(self) -> float:
        if self._device.type == "cuda":
            # Kernels are queued: without this a span would be the time to queue them.
            torch.cuda.synchronize(self._device)
        return time.perf_counter() + self._offset
