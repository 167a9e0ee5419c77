"""Nodes that arrive at their target as functions: what they describe is built where it is wanted, or never."""

from collections.abc import Callable, Mapping
from typing import Any

Instantiate = Callable[..., Any]


class NodeFactory:
    """Builds what a node describes, at each call anew.

    A call's keywords go to every target in the node that has an argument of such a name and no value for it.

    Args:
        key: where the node stands.
        node: has `_target_`.
        instantiate: builds a node.
    """

    takes_settings = True
    """`mlotool.spaces` hands over all that it knows of a place."""

    def __init__(self, key: str, node: Mapping[str, Any], instantiate: Instantiate) -> None:
        self._key, self._node, self._instantiate = key, node, instantiate

    def __call__(self, **settings: Any) -> Any:
        """Return what the node describes."""
        return self._instantiate(self._key, self._node, **settings)


def as_factories(key: str, value: Any, instantiate: Instantiate) -> Any:
    """Return a value in which each node with a `_target_` is a function that builds it; other values stay."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return NodeFactory(key, value, instantiate)
        return {name: as_factories(f"{key}.{name}", each, instantiate) for name, each in value.items()}
    if isinstance(value, list):
        return [as_factories(f"{key}[{index}]", each, instantiate) for index, each in enumerate(value)]
    return value
