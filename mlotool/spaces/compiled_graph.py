"""A graph as a function, which can be pickled."""

import linecache
import weakref
from collections.abc import Mapping
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any, Self

from torch import fx

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
        modules = {name: each.__name__ for name, each in self._names.items() if isinstance(each, ModuleType)}
        others = {name: each for name, each in self._names.items() if name not in modules}
        return _again, (type(self), self._source, modules, others, self._title)


def _again(
    kind: type[CompiledGraph], source: str, modules: Mapping[str, str], others: Mapping[str, Any], title: str
) -> CompiledGraph:
    return kind(source, {name: import_module(each) for name, each in modules.items()} | dict(others), title)


def compiled(graph: fx.Graph, title: str) -> CompiledGraph:
    """Return a graph as a function.

    Args:
        graph: what is computed.
        title: of the model, for tracebacks.
    """
    code = graph.python_code("self")
    return CompiledGraph(code.src, code.globals, title)
