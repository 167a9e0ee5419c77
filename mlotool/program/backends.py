"""How a flat program of tensor operations is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from mlotool.program.flat_graph import add_writes, simplified, with_direct_calls
from mlotool.program.fusible import FUSIBLE
from mlotool.program.graphed_run import GraphedRun, captured
from mlotool.program.narrow_softmax import NARROW_SOFTMAX

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
