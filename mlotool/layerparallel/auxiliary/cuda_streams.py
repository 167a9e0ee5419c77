"""CUDA streams for the stages of one process, so that small kernels of several stages run at the same time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class CudaStreams:
    """A stream for each stage but the last one, which stays on the current one, where the loss is.

    Between `fork` and `join` no other stream may change what the stages read; tensors that go from stage to stage
    are waited for by whoever receives them (`LocalExchange`).

    Args:
        numbers: of the stages with a stream of their own; none does nothing.
        device: a CUDA device, if there are any.
    """

    def __init__(self, numbers: Iterable[int], device: torch.device) -> None:
        self._device = device
        self._streams = {number: torch.cuda.Stream(device) for number in numbers}

    def fork(self) -> None:
        """Let the stages' streams wait for all that was begun so far."""
        for stream in self._streams.values():
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Work on the stream of a stage."""
        if number not in self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[number]):
            yield

    def join(self) -> None:
        """Let the current stream wait for all stages."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
