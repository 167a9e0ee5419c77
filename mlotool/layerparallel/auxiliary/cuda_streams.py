"""CUDA streams for the stages of one process, so that small kernels of several stages run at the same time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class CudaStreams:
    """A CUDA stream for each stage but the last, which works on the current stream, where the loss is computed.

    Between `fork` and `join` no other stream may change what the stages read. Whoever receives a tensor from another
    stage waits for it (`LocalTransport`).

    Args:
        numbers: of the stages with a stream of their own; without any, all methods do nothing.
        device: of the streams, a CUDA device; any device where there are no streams.

    Example:
        >>> streams = CudaStreams([], torch.device("cpu"))
        >>> streams.fork()
        >>> with streams.at(0):
        ...     total = torch.ones(2).sum()
        >>> streams.join()
        >>> total
        tensor(2.)
    """

    def __init__(self, numbers: Iterable[int], device: torch.device) -> None:
        self._device = device
        self._streams = {number: torch.cuda.Stream(device) for number in numbers}

    def fork(self) -> None:
        """Let the stages' streams wait for all work that the current stream has been given so far."""
        for stream in self._streams.values():
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """While it lasts, work on the stream of a stage; on the current one where the stage has none of its own."""
        if number not in self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[number]):
            yield

    def join(self) -> None:
        """Let the current stream wait for all stages."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
