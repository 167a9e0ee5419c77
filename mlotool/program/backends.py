"""How a flat program of tensor operations is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from mlotool.program.decompositions import FUSIBLE, NARROW_SOFTMAX
from mlotool.program.flat_graph import add_writes, simplified, with_direct_calls

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


Run = Callable[..., Sequence[Tensor]]
"""`(parameters, optimizers' state, rates, buffers, tensors of the batches) -> outputs`."""

Finish = Callable[[GraphModule, Sequence[Tensor], int], Run]
"""Makes what runs a graph, for such arguments, of which the first so many stay where they are from run to run."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run.

    Args:
        finish: makes what runs a graph.
        has_fused_steps: whether optimizers step by torch's fused kernels, as without a trace; else by plain operations,
            which a compiler fuses with what is around them.
        decompositions: for `make_fx`, by operation what it consists of.
    """

    finish: Finish
    has_fused_steps: bool
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)

    def made(
        self, flat: GraphModule, arguments: Sequence[Tensor], num_moved: int, *, in_place: bool
    ) -> tuple[Run, tuple[int, ...]]:
        """Return what runs a graph, and the positions of the arguments that change, where that is left to the caller.

        Args:
            flat: its first outputs are what its first arguments are to become.
            arguments: examples.
            num_moved: how many of them these are; all but the batches.
            in_place: whether it writes them itself.
        """
        graph = simplified(flat)
        writes = add_writes(graph, num_moved, in_place=in_place)
        return self.finish(graph, arguments, num_moved), writes


def _eager(graph: GraphModule, arguments: Sequence[Tensor], num_fixed: int) -> Run:
    run: Run = with_direct_calls(graph).forward
    return run


def _inductor(graph: GraphModule, arguments: Sequence[Tensor], num_fixed: int) -> Run:
    import torch
    import torch._inductor

    for node in graph.graph.nodes:
        # The shapes that tracing has noted are of another mode than the compiler's.
        node.meta.clear()
    # In C++ what calls the kernels takes half the time that it takes in Python.
    options = {"cpp_wrapper": all(tensor.device.type == "cpu" for tensor in arguments)}
    with torch.no_grad():
        compiled: Run = torch._inductor.compile(graph, [*arguments], options=options)
    return compiled


def _cuda_graph(graph: GraphModule, arguments: Sequence[Tensor], num_fixed: int) -> Run:
    if any(not tensor.is_cuda for tensor in arguments):
        raise LookupError("a CUDA graph reads no tensors on the CPU, and some parameters, states or batches are there")
    run = GraphedRun(_eager(graph, arguments, num_fixed), num_fixed, captured)
    # On examples: what cannot be recorded says so before anything depends on it.
    run(*[tensor.clone() for tensor in arguments])
    return run


BACKENDS = {
    "eager": Backend(_eager, has_fused_steps=True, decompositions=NARROW_SOFTMAX),
    "inductor": Backend(_inductor, has_fused_steps=False, decompositions=FUSIBLE),
    "cuda_graph": Backend(_cuda_graph, has_fused_steps=True),
}
"""Operation by operation; as kernels that PyTorch's compiler has fused; or as a CUDA graph, one launch for all."""
