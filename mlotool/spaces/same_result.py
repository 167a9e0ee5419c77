"""Whether a graph computes what the model computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces.compiled_graph import compiled
from mlotool.spaces.node_calls import is_of_torch, kept_attributes
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.tracing import Whole

_LEAF = (
    "Declare the module that does as a leaf, or write leaves: ['.'], which makes one node of the whole model, or "
    "correct its forward."
)


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


class OwnResult:
    """What a model's own forward returns, in evaluation, on random inputs; graphs are compared with it.

    What a forward asks of its input beside the input's values, as its type, was answered for a stand-in when the graph
    was made. Where that changes the result, it shows here. Nothing is computed where modules have no values.

    The forward runs before shapes are computed: a table that it makes once for all (`functools.cache`) is of values.

    Args:
        root: the model.
        shapes: of its inputs.
    """

    def __init__(self, root: nn.Module, shapes: Shapes) -> None:
        self._kind = type(root.base if isinstance(root, Whole) else root).__name__
        self._is_whole, self._is_without_values = isinstance(root, Whole), shapes.is_without_values
        self._result: list[Any] = []
        self._error: Exception | None = None
        if self._is_without_values:
            return
        self._device = next(root.parameters(), torch.zeros(())).device
        with self._kept_random_states():
            self._inputs = shapes.random(self._device)
        try:
            self._result = self._of(root, root.base.forward if isinstance(root, Whole) else root.forward)
        except Exception as error:
            # Shapes that do not fit have a message of their own, with the node, when they are computed.
            self._error = error

    def check(self, root: nn.Module, graph: fx.Graph) -> None:
        """Compare a graph with the forward that it was made from.

        Raises:
            ConfigError: the forward fails, or the results differ.
        """
        if self._is_without_values:
            return
        if "FakeTensor" in str(self._error) or _has_stand_in(self._result):
            raise ConfigError(
                f"base: the forward of {self._kind} reads a tensor without values, which it has kept from when the "
                "shapes of another model were computed; expected modules that keep no tensor of their first call "
                "outside of themselves (functools.cache), but in a buffer: self.register_buffer(..). Correct the model."
            ) from self._error
        if self._error is not None:
            raise ConfigError(
                f"inputs: the forward of {self._kind} fails on random inputs of these shapes, zeros and ones where "
                f"they are whole numbers ({_reason(self._error)}); expected inputs that it takes. Correct them, or "
                "the model."
            ) from self._error
        if self._is_whole:
            return
        own = self._result
        traced = self._of_graph(root, graph)
        found = _difference(own, traced)
        if not found:
            return
        if _difference(traced, self._of_graph(root, graph)):
            raise ConfigError(
                f"leaves: the forward of {self._kind} returns something else each time that it is called with the "
                "same inputs and random numbers, so that its graph cannot be compared with it; expected a forward that "
                f"keeps nothing from call to call. {_LEAF}"
            )
        raise ConfigError(
            f"leaves: the forward of {self._kind} computes something else than its graph ({found}); expected steps "
            "that ask for nothing but shapes and values of tensors (no isinstance or hasattr of an input), and no "
            f"`+=` of a tensor that is read under another name. {_LEAF}"
        )

    def check_runs(self, root: nn.Module, graph: fx.Graph) -> None:
        """Run a graph that mutators have changed, if it calls modules that are no layers of torch's.

        Raises:
            InfeasibleModelError: it fails, or has kept a stand-in of a tensor from when shapes were computed.
        """
        called = (root.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module")
        inside = (each for module in called for each in module.modules())
        if self._is_without_values or all(map(is_of_torch, inside)):
            return
        try:
            result = self._of_graph(root, graph)
        except Exception as error:
            raise InfeasibleModelError(
                f"mutators: the model that they make of {self._kind} fails on random inputs ({_reason(error)}); "
                "expected one that runs, and modules that keep no tensor of their first call outside of themselves "
                "(functools.cache). Correct the candidate."
            ) from error
        if _has_stand_in(result):
            raise InfeasibleModelError(
                "mutators: found a tensor without values in what the model returns, which a new module has kept from "
                "when shapes were computed; expected modules that keep no tensor of their first call outside of "
                "themselves (functools.cache), or a buffer: self.register_buffer(..). Correct the candidate."
            )

    def _of_graph(self, root: nn.Module, graph: fx.Graph) -> list[Any]:
        function = compiled(graph, self._kind)
        return self._of(root, lambda *inputs: function(root, *inputs))

    def _of(self, root: nn.Module, forward: Callable[..., Any]) -> list[Any]:
        """Return the tensors that a forward returns in evaluation, and leave modules as they are."""
        modes = {module: module.training for module in root.modules()}
        with kept_attributes(root), kept_buffers(root), self._kept_random_states(), torch.no_grad():
            root.eval()
            try:
                return pytree.tree_leaves(forward(*(each.clone() for each in self._inputs)))
            finally:
                for module, mode in modes.items():
                    module.training = mode

    def _kept_random_states(self) -> Any:
        """Put back the random numbers of the devices that are used; none is seeded, as that would change others."""
        kind = self._device.type
        return torch.random.fork_rng(
            [] if kind == "cpu" else [self._device], device_type="cuda" if kind == "cpu" else kind
        )


def _has_stand_in(result: list[Any]) -> bool:
    return any(isinstance(each, FakeTensor) for each in result)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _difference(own: list[Any], traced: list[Any]) -> str:
    """Return in words how two results differ; nothing where they are equal."""
    if len(own) != len(traced):
        return f"{len(own)} results, and {len(traced)} of the graph"
    for number, (one, other) in enumerate(zip(own, traced, strict=True)):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"result {number} is {_kind(one)}, and {_kind(other)} of the graph"
            if not torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all():
                return f"the values of result {number} differ by up to {_gap(one, other):.2g}"
        elif type(one) is not type(other) or one != other:
            return f"result {number} is {type(one).__name__}, and {type(other).__name__} of the graph"
    return ""


def _kind(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def _gap(one: Tensor, other: Tensor) -> float:
    return (one.to(torch.complex128) - other.to(torch.complex128)).abs().max().item()
