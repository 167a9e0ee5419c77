"""Whether a graph computes what the model computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mlotool.core.errors import ConfigError
from mlotool.spaces.compiled_graph import compiled
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.tracing import Whole


@contextmanager
def kept_buffers(root: nn.Module) -> Iterator[None]:
    """Put back the values of buffers, which a forward may change in evaluation too."""
    kept = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def check_result(root: nn.Module, graph: fx.Graph, shapes: Shapes) -> None:
    """Compare a graph with the forward that it was made from, in evaluation, on random inputs.

    What a forward asks of its input beside the input's values, as its type, was answered for a stand-in when the graph
    was made. Where that changes the result, it shows here. Nothing is compared where modules have no values.

    Raises:
        ConfigError: the results differ.
    """
    if shapes.is_without_values or isinstance(root, Whole):
        return
    modes = {module: module.training for module in root.modules()}
    device = next(root.parameters(), torch.zeros(())).device
    function = compiled(graph, type(root).__name__)
    root.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            results = []
            for forward in (root.forward, lambda *inputs: function(root, *inputs)):
                torch.manual_seed(0)
                results.append(pytree.tree_leaves(forward(*shapes.random(device))))
    finally:
        for module, mode in modes.items():
            module.training = mode
    own, traced = results
    if len(own) != len(traced) or not all(map(_is_same, own, traced)):
        raise ConfigError(
            f"leaves: the forward of {type(root).__name__} computes something else than its graph; expected steps that "
            "ask for nothing but shapes and values of tensors (no isinstance of an input). Declare the module that "
            "does as a leaf, or write leaves: ['.'], which makes one node of the whole model."
        )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    return bool(one == other)
