"""A graph as a function, which can be pickled; and whether it computes what the model computes."""

import linecache
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.private import pytree
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.tracing import AS_LEAF, Whole, kept_attributes

_numbers = count()


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
    """What a model's own forward returns on random inputs, as it stands and in evaluation; graphs are compared with it.

    What a forward asks of its input beside the input's values, as its type, was answered for a stand-in when the graph
    was made. Where that changes the result, it shows here. Nothing is computed where modules have no values.

    Args:
        root: the model.
        shapes: of its inputs.
        modes: whether each module trains, as the model stands.

    Raises:
        ConfigError: the forward fails.
    """

    def __init__(self, root: nn.Module, shapes: Shapes, modes: Mapping[nn.Module, bool]) -> None:
        own = root.base if isinstance(root, Whole) else root
        self._root, self._kind = root, type(own).__name__
        self._modes = modes, dict.fromkeys(modes, False)
        self._device = next(root.parameters(), torch.zeros(())).device
        self._is_compared = not (isinstance(root, Whole) or shapes.is_without_values)
        if shapes.is_without_values:
            return
        with self._kept_random_states():
            self._inputs = shapes.random(self._device)
        try:
            self._result = self._of(own.forward)
        except Exception as error:
            raise ConfigError(
                f"inputs: the forward of {self._kind} fails on random inputs of these shapes, zeros and ones where "
                f"they are whole numbers ({type(error).__name__}: {shown(str(error))}); expected inputs that it takes. "
                "Correct them, or the model."
            ) from error

    def check(self, graph: fx.Graph) -> None:
        """Compare a graph with the forward that it was made from.

        Raises:
            ConfigError: the results differ.
        """
        if not self._is_compared:
            return
        function = partial(compiled(graph, self._kind), self._root)
        of_graph = self._of(function)
        if difference := _difference(self._result, of_graph):
            # A forward that keeps something from call to call differs from itself as well.
            is_other = bool(_difference(of_graph, self._of(function)))
            what = "something else each time that it is called" if is_other else "something else than its graph"
            raise ConfigError(
                f"leaves: the forward of {self._kind} computes {what} ({difference}); expected steps that ask for "
                "nothing but shapes and values of tensors, keep nothing from call to call, and change nothing that is "
                f"read under another name. Declare the module that does as a leaf, or {AS_LEAF}."
            )

    def _of(self, forward: Callable[..., Any]) -> list[Any]:
        """Return the tensors that a forward returns in both modes, and leave modules as they are."""
        results = []
        for modes in self._modes:
            with kept_attributes(self._root), kept_buffers(self._root), self._kept_random_states(), torch.no_grad():
                for module, is_training in modes.items():
                    module.training = is_training
                results += pytree.tree_leaves(forward(*(argument.clone() for argument in self._inputs)))
        return results

    def _kept_random_states(self) -> Any:
        """Put back the random numbers of the devices that are used; none is seeded, as that would change others."""
        kind = self._device.type
        devices, device_type = ([], "cuda") if kind == "cpu" else ([self._device], kind)
        return torch.random.fork_rng(devices, device_type=device_type)


def _difference(own: list[Any], of_graph: list[Any]) -> str:
    """Return in words how two results differ; nothing where they are equal."""
    tensors, others = (
        [[value for value in values if isinstance(value, Tensor) is is_tensor] for values in (own, of_graph)]
        for is_tensor in (True, False)
    )
    if others[0] != others[1]:
        return f"{shown(others[0])}, and {shown(others[1])} of the graph"
    try:
        torch.testing.assert_close(*tensors, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""
