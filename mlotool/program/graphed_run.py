"""A flat program as a CUDA graph: its kernels are recorded once, and launched by one call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Program = Callable[..., Sequence[Tensor]]
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], None], Sequence[Tensor]]]
"""Records a function; returns what replays it, and its outputs, which a replay fills anew."""


class GraphedRun:
    """Runs a program by a recording of it, which reads and writes at the addresses of the tensors it was made with.

    Parameters, optimizers' state and buffers stay where they are; where one has moved, the program is recorded anew.
    Batches are copied to where the recording reads them; outputs are copies.

    Args:
        run: the program.
        num_fixed: how many of its first arguments stay where they are.
        capture: records; `captured` for CUDA.
    """

    def __init__(self, run: Program, num_fixed: int, capture: Capture) -> None:
        self._run = run
        self._num_fixed = num_fixed
        self._capture = capture
        self._addresses: list[int] = []
        self._batches: list[Tensor] = []
        self._outputs: Sequence[Tensor] = []
        self._replay: Callable[[], None] = lambda: None

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return the outputs; arguments that the program writes are written."""
        fixed, batches = arguments[: self._num_fixed], arguments[self._num_fixed :]
        addresses = [tensor.data_ptr() for tensor in fixed]
        if addresses != self._addresses:
            self._record(fixed, batches)
            self._addresses = addresses
        elif batches:
            torch._foreach_copy_(self._batches, batches)
        self._replay()
        return [output.clone() for output in self._outputs]

    def _record(self, fixed: Sequence[Tensor], batches: Sequence[Tensor]) -> None:
        self._batches = [tensor.detach().clone() for tensor in batches]
        # A run before the recording sets libraries up, and is taken back.
        before = [tensor.detach().clone() for tensor in fixed]
        self._run(*fixed, *self._batches)
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in fixed], before)
        self._replay, self._outputs = self._capture(lambda: self._run(*fixed, *self._batches))


def captured(function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Record a function as a CUDA graph.

    Raises:
        RuntimeError: it does what a graph cannot hold, such as to wait for the device.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs
