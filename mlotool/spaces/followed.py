"""Modules whose forward a graph has followed: they are not called any more, and neither would their hooks be."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces.own_behaviour import CALL_HOOKS
from mlotool.spaces.tracing import CALLS


class _NoHooks(OrderedDict[int, Any]):
    """The hooks of a module that nobody calls: none."""

    def __setitem__(self, key: int, value: Any) -> None:
        """Refuse one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "found a new hook of a module whose forward a space has followed, so that it would not be called; expected "
            "hooks of the space, of its layers and of its leaves. Register it there, or declare the module as a leaf: "
            "leaves: [<its path>]."
        )


def followed(graph: fx.Graph) -> set[str]:
    """Return the paths of the modules whose forward a graph has followed."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    every = {call.partition("@")[0] for node in graph.nodes for call in node.meta.get(CALLS, ())}
    return every - called - {""}


def refuse_hooks(root: nn.Module, paths: Iterable[str]) -> None:
    """Let modules refuse hooks of calls from now on; those that are not there any more are passed over."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for path in paths:
        if path in modules:
            modules[path].__dict__.update({name: _NoHooks() for name in CALL_HOOKS.values()})
