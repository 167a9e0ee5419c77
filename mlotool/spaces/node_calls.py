"""One node of a graph, called: what it returns, and what the call does to what it is given."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mlotool.spaces.node_order import nodes_in


@dataclass(frozen=True)
class Effect:
    """What a call does to its operands, by their positions in `nodes_in` of its arguments.

    Args:
        viewed: those whose memory the result has, as `x.view(-1)` has that of x.
        changed: those that are changed in place, as `x.relu_()` does.
    """

    viewed: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node is called with, as often as it is."""
    return nodes_in((node.args, dict(node.kwargs)))


def called(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> tuple[Any, Effect]:
    """Call a node, and put back what the call sets on modules that are no layers of torch's.

    Args:
        node: of the graph.
        root: the model.
        values: of the nodes that it is called with.

    Returns:
        its result, and what the call does beside.
    """
    given = [_tensors(values[each]) for each in operands(node)]
    versions = [[each._version for each in tensors] for tensors in given]
    result = _result(node, root, values)
    returned = _tensors(result)
    changed = (
        position for position, tensors in enumerate(given) if [each._version for each in tensors] != versions[position]
    )
    viewed = (
        position
        for position, tensors in enumerate(given)
        if any(one.untyped_storage()._cdata == other.untyped_storage()._cdata for one in tensors for other in returned)
    )
    return result, Effect(frozenset(viewed), frozenset(changed))


def is_of_torch(module: nn.Module) -> bool:
    """Say whether a module is a layer of torch's, which keeps nothing of a call."""
    return type(module).__module__.startswith("torch.nn.")


@contextmanager
def kept_attributes(root: nn.Module) -> Iterator[None]:
    """Put back what is set on modules, and the contents of their lists and dicts: tables that a first call makes."""
    kept: dict[int, tuple[Any, Any]] = {}
    for module in root.modules():
        _gather(vars(module), kept)
    try:
        yield
    finally:
        for container, contents in kept.values():
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(contents)


def _gather(value: Any, found: dict[int, tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list | set | deque) and id(value) not in found:
        found[id(value)] = (value, copy.copy(value))
    elif not isinstance(value, tuple):
        return
    for each in list(value.values() if isinstance(value, dict) else value):
        if isinstance(each, dict | list | set | deque | tuple):
            _gather(each, found)


def _result(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if is_of_torch(module) and not module._modules:
            return module(*args, **kwargs)
        with kept_attributes(module):
            return module(*args, **kwargs)
    if node.op == "get_attr":
        found: Any = root
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return found
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and each.layout == torch.strided]
