"""What each stage did when, for the first batches."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Timeline:
    """What each stage did when: spans of time of the first batches, in seconds since the first batch began.

    Args:
        num_batches: how many batches are recorded; 0 records nothing and costs nothing.

    Attributes:
        spans: recorded so far: mappings with `rank`, `batch`, `what`, `begin` and `end`.

    Example:
        >>> timeline = Timeline(num_batches=1)
        >>> timeline.begin(0, torch.device("cpu"))
        >>> with timeline.span(rank=0, what="forward"):
        ...     total = torch.ones(2).sum()
        >>> [(span["rank"], span["batch"], span["what"]) for span in timeline.spans]
        [(0, 0, 'forward')]
    """

    def __init__(self, num_batches: int) -> None:
        self.spans: list[dict[str, Any]] = []
        self._num_batches = num_batches
        self._batch = -1
        self._began = self._began_at = 0.0
        self._device = torch.device("cpu")

    @property
    def is_recording(self) -> bool:
        """Whether the batch at hand is recorded."""
        return 0 <= self._batch < self._num_batches

    def begin(self, batch: int, device: torch.device) -> None:
        """Begin a batch, counted from 0."""
        self._batch, self._device = batch, device
        if batch == 0:
            self._began, self._began_at = time.perf_counter(), time.time()

    def state(self) -> tuple[float, list[dict[str, Any]]]:
        """Return when the first batch began, in seconds since the epoch, and the spans since then."""
        return self._began_at, self.spans

    @staticmethod
    def joined(states: Sequence[tuple[float, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """Return the spans of several processes in order, in seconds since the first of them began."""
        begun = [began for began, spans in states if spans]
        moved = [
            {**span, "begin": span["begin"] + began - min(begun), "end": span["end"] + began - min(begun)}
            for began, spans in states
            for span in spans
        ]
        return sorted(moved, key=lambda span: (span["batch"], span["begin"]))

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
        return time.perf_counter() - self._began
