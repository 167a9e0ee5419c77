"""Nodes in the order in which they are computed."""

from collections.abc import Sequence
from typing import Any

from torch import fx


def last_of(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """Return the one of some nodes that is computed last."""
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted][-1]


def nodes_in(arguments: Any) -> list[fx.Node]:
    """Return the nodes in what a node is called with."""
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return found
