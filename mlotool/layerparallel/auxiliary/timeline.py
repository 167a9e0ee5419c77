"""What each stage did when, for the first batches."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mlotool.layerparallel.partition.chain import imbalance
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup


class Timeline:
    """What each stage did when: spans of time of the first batches, in seconds.

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
        self._device = torch.device("cpu")

    def begin(self, batch: int, device: torch.device) -> None:
        """Begin a batch, counted from 0."""
        self._batch, self._device = batch, device

    @staticmethod
    def joined(processes: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the spans of several processes in order, in seconds since the first of them began."""
        spans = [span for process in processes for span in process]
        first = min((span["begin"] for span in spans), default=0.0)
        moved = [{**span, "begin": span["begin"] - first, "end": span["end"] - first} for span in spans]
        return sorted(moved, key=lambda span: (span["batch"], span["begin"]))

    @contextmanager
    def span(self, rank: int, what: str) -> Iterator[None]:
        """Record how long something takes.

        Args:
            rank: of the stage.
            what: forward, backward, communication or auxnet.
        """
        if not 0 <= self._batch < self._num_batches:
            yield
            return
        begin = self._now()
        yield
        self.spans.append({"rank": rank, "batch": self._batch, "what": what, "begin": begin, "end": self._now()})

    def _now(self) -> float:
        if self._device.type == "cuda":
            # Kernels are queued: without this a span would be the time to queue them.
            torch.cuda.synchronize(self._device)
        # Since the epoch: several processes have one clock.
        return time.time()


def forecast(cut: Sequence[str], timeline: Mapping[str, Any] | None) -> list[str]:
    """Return how well stages are balanced, and how much faster they are at most, in sentences.

    The first batch is left out where there are others, since it has work of its own.

    Args:
        cut: names of the layers that begin the stages 1 .. K-1.
        timeline: as of `Auxiliary.timeline`; None where nothing was recorded.

    Example:
        >>> spans = [{"rank": rank, "batch": 0, "what": what, "begin": 0.0, "end": seconds}
        ...          for rank, what, seconds in ((0, "forward", 1.0), (1, "forward", 2.0), (1, "auxnet", 0.3))]
        >>> for line in forecast(["blocks.3"], {"stages": 2, "spans": spans}):
        ...     print(line)
        2 stages begin at the input and at blocks.3; the longest takes 1.33 times the mean (1e+03 / 2e+03 ms).
        With a process for each stage a batch is at most 1.30 times as fast as in one process, and 1.67 times with \
stages of equal length (equation 27 of Sun et al. 2021).
    """
    if timeline is None or timeline["stages"] == 1:
        return []
    spans = timeline["spans"]
    batches = {span["batch"] for span in spans}
    kept = batches - {min(batches)} or batches
    count = timeline["stages"]

    def mean(rank: int, kinds: Sequence[str]) -> float:
        some = [span for span in spans if span["rank"] == rank and span["what"] in kinds and span["batch"] in kept]
        return sum(span["end"] - span["begin"] for span in some) / len(kept)

    stages = [mean(rank, ("forward", "backward")) for rank in range(count)]
    method = max(mean(rank, ["auxnet"]) for rank in range(count))
    equal = predicted_speedup(BatchSeconds(forward=sum(stages), backward=0.0, penalty=method), count)
    places = " and at ".join(["the input", ", ".join(cut)])
    times = " / ".join(f"{1e3 * seconds:.3g}" for seconds in stages)
    return [
        f"{count} stages begin at {places}; the longest takes {imbalance(stages):.2f} times the mean ({times} ms).",
        f"With a process for each stage a batch is at most {sum(stages) / (max(stages) + method):.2f} times as fast as "
        f"in one process, and {equal:.2f} times with stages of equal length (equation 27 of Sun et al. 2021).",
    ]
