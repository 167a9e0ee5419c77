"""One graph of a forward in training and in evaluation: what is a module's mode there follows that module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import fx

MODE = "mode"
"""What `node.meta` holds of a node that stands for a mode: the path of the module whose mode it is."""


class OtherStepsError(Exception):
    """Graphs differ in more than in modes.

    Args:
        node: where.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass(frozen=True)
class _Mode:
    path: str


def join(graph: fx.Graph, other: fx.Graph, marked: Sequence[fx.Graph]) -> None:
    """Let values that are the mode of a module follow that module.

    Args:
        graph: in training, which is changed.
        other: in evaluation.
        marked: those in which modes are nodes; none where the two differ in nothing.

    Raises:
        OtherStepsError: they differ in more than that, or a value is not the mode of one module alone.
    """
    nodes = list(graph.nodes)
    others = [[node for node in each.nodes if MODE not in node.meta] for each in (other, *marked)]
    same = {node: node for node in nodes}
    for number, node in enumerate(nodes):
        every = [node, *(each[number] for each in others if number < len(each))]
        if len(every) <= len(others) or len({(each.op, str(each.target)) for each in every}) > 1:
            raise OtherStepsError(node)
        same |= dict.fromkeys(every, node)
    if any(len(each) > len(nodes) for each in others):
        raise OtherStepsError(nodes[-1])
    for node, *every in zip(nodes, *others, strict=True):
        arguments = [_arguments(each, same) for each in (node, *every)]
        try:
            node.args, node.kwargs = _joined(arguments, len(marked), cache(partial(_mode_before, graph, node)))
        except ValueError:
            raise OtherStepsError(node) from None


def _arguments(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> Any:
    """Return what a node is called with, by the nodes of the one graph."""
    return fx.node.map_arg(
        (node.args, dict(node.kwargs)),
        lambda each: _Mode(each.meta[MODE]) if MODE in each.meta else same[each],  # type: ignore[arg-type, return-value]
    )


def _joined(every: Sequence[Any], num_marked: int, follow: Callable[[str], fx.Node]) -> Any:
    """Return what an argument is in all graphs; a ValueError where they differ in more than in one module's mode."""
    first = every[0]
    if modes := [each for each in every if isinstance(each, _Mode)]:
        if len(modes) < num_marked or len(set(modes)) > 1:
            raise ValueError
        return follow(modes[0].path)
    if any(type(each) is not type(first) for each in every):
        raise ValueError
    if isinstance(first, slice):
        return slice(*_joined([(each.start, each.stop, each.step) for each in every], num_marked, follow))
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in every):
            raise ValueError
        return {key: _joined([each[key] for each in every], num_marked, follow) for key in first}
    if isinstance(first, list | tuple):
        items = [_joined(each, num_marked, follow) for each in zip(*every, strict=True)]
        return items if isinstance(first, list) else tuple(items)
    if any(each != first for each in every):
        raise ValueError
    return first


def _mode_before(graph: fx.Graph, node: fx.Node, path: str) -> fx.Node:
    """Return a node that is whether the module at a path trains, where another node reads it."""
    with graph.inserting_before(node):
        mode = graph.create_node("get_attr", f"{path}.training" if path else "training")
    mode.meta.update(node.meta)
    return mode
