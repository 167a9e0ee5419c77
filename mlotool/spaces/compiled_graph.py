"""A graph as a function, which can be pickled; and whether it computes what the model computes."""

import linecache
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces.shapes import Shapes, is_of_torch
from mlotool.spaces.tracing import AS_LEAF, Whole, kept_attributes

_numbers = count()

_STAND_IN = (
    "a tensor without values, kept from when shapes were computed; expected modules that keep no tensor of their first "
    "call outside of themselves (functools.cache), but in a buffer: self.register_buffer(..)."
)


class CompiledGraph:
    """A graph as a function of its module and its inputs; tracebacks show its lines.

    Pickled it is its source, and by name what that refers to: functions of torch, or a mutator's. A lambda or a
    function within another has no name.

    Args:
        source: in Python, of a function `forward`.
        names: what the source refers to.
        title: for tracebacks.
    """

    def __init__(self, source: str, names: Mapping[str, Any], title: str) -> None:
        self._source, self._names, self._title = source, dict(names), title
        file = f"<graph of {title} {next(_numbers)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        # A search makes thousands of graphs in one process.
        weakref.finalize(self, linecache.cache.pop, file, None).atexit = False
        namespace = dict(names)
        exec(compile(source, file, "exec"), namespace)
        self._function = namespace["forward"]

    def __call__(self, *args: Any) -> Any:
        """Return what the graph computes."""
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself, which has no state."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Say how to make it again: modules, which cannot be pickled, by their names."""
        modules = {name: value.__name__ for name, value in self._names.items() if isinstance(value, ModuleType)}
        others = {name: value for name, value in self._names.items() if name not in modules}
        return _again, (self._source, modules, others, self._title)


def _again(source: str, modules: Mapping[str, str], others: Mapping[str, Any], title: str) -> CompiledGraph:
    return CompiledGraph(source, {name: import_module(each) for name, each in modules.items()} | dict(others), title)


def compiled(graph: fx.Graph, title: str) -> CompiledGraph:
    """Return a graph as a function.

    Args:
        graph: what is computed.
        title: of the model, for tracebacks.
    """
    code = graph.python_code("self")
    return CompiledGraph(code.src, code.globals, title)


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
        own = root.base if isinstance(root, Whole) else root
        self._kind = type(own).__name__
        self._is_whole, self._is_without_values = isinstance(root, Whole), shapes.is_without_values
        self._result: list[Any] = []
        self._error: Exception | None = None
        if self._is_without_values:
            return
        self._device = next(root.parameters(), torch.zeros(())).device
        with self._kept_random_states():
            self._inputs = shapes.random(self._device)
        try:
            self._result = self._of(root, own.forward)
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
                f"base: the forward of {self._kind} reads {_STAND_IN} Correct the model."
            ) from self._error
        if self._error is not None:
            raise ConfigError(
                f"inputs: the forward of {self._kind} fails on random inputs of these shapes, zeros and ones where "
                f"they are whole numbers ({_reason(self._error)}); expected inputs that it takes. Correct them, or "
                "the model."
            ) from self._error
        if self._is_whole:
            return
        of_graph = self._of_graph(root, graph)
        if difference := _difference(self._result, of_graph):
            # A forward that keeps something from call to call differs from itself as well.
            is_other = bool(_difference(of_graph, self._of_graph(root, graph)))
            what = "something else each time that it is called" if is_other else "something else than its graph"
            raise ConfigError(
                f"leaves: the forward of {self._kind} computes {what} ({difference}); expected steps that ask for "
                "nothing but shapes and values of tensors (no isinstance or hasattr of an input), keep nothing from "
                "call to call, and no `+=` of a tensor that is read under another name. Declare the module that does "
                f"as a leaf, or {AS_LEAF}."
            )

    def check_runs(self, root: nn.Module, graph: fx.Graph) -> None:
        """Run a graph that mutators have changed, if it calls modules that are no layers of torch's.

        Raises:
            InfeasibleModelError: it fails, or has kept a stand-in of a tensor from when shapes were computed.
        """
        called = (root.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module")
        if self._is_without_values or all(is_of_torch(each) for module in called for each in module.modules()):
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
            raise InfeasibleModelError(f"mutators: the model returns {_STAND_IN} Correct the candidate.")

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
        devices, device_type = ([], "cuda") if kind == "cpu" else ([self._device], kind)
        return torch.random.fork_rng(devices, device_type=device_type)


def _has_stand_in(result: list[Any]) -> bool:
    return any(isinstance(value, FakeTensor) for value in result)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _difference(own: list[Any], traced: list[Any]) -> str:
    """Return in words how two results differ; nothing where they are equal."""
    if len(own) != len(traced):
        return f"{len(own)} results, and {len(traced)} of the graph"
    for number, (one, other) in enumerate(zip(own, traced, strict=True)):
        kinds = [_kind(one), _kind(other)]
        if kinds[0] != kinds[1]:
            return f"result {number} is {kinds[0]}, and {kinds[1]} of the graph"
        if isinstance(one, Tensor) and not torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all():
            gap = (one.to(torch.complex128) - other.to(torch.complex128)).abs().max().item()
            return f"the values of result {number} differ by up to {gap:.2g}"
        if not isinstance(one, Tensor) and one != other:
            return f"result {number} is {one!r:.50}, and {other!r:.50} of the graph"
    return ""


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
