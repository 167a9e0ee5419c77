"""What mutators have done to a graph."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One operation of a mutator on the graph.

    Args:
        mutator: its name.
        operation: create, delete, connect, replace or insert.
        node: id of the node that it concerns.
    """

    mutator: str
    operation: str
    node: str
