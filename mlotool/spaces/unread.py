"""Nodes whose results nobody reads."""

from torch import fx, nn

from mlotool.spaces.in_place import changed
from mlotool.spaces.targets import node_id


def unread(graph: fx.Graph) -> set[str]:
    """Return the ids of the nodes whose results no other node reads."""
    return {node_id(node) for node in graph.nodes if node.op != "output" and not node.users}


def remove_unread(graph: fx.Graph, root: nn.Module, kept: set[str]) -> None:
    """Take out nodes that nobody reads any more; inputs stay, and so does what changes a tensor in place.

    Args:
        graph: of the model.
        root: the model.
        kept: ids of nodes that stay: nobody has read them before, either.
    """
    for node in reversed(list(graph.nodes)):
        is_plain = node.op not in ("placeholder", "output") and changed(node, root) is None
        if is_plain and not node.users and node_id(node) not in kept:
            graph.erase_node(node)
