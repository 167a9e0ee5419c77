"""A stream that repeats another one's last batch."""

from collections.abc import Mapping
from typing import Any

import torch

from mlotool.core.arguments import require
from mlotool.problem.stream import Stream


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
