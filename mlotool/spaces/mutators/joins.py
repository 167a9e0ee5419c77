"""Several nodes become one: by sum, mean or concatenation, as the user says."""

from collections.abc import Sequence

import torch
from torch import fx

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown
from mlotool.spaces.model_graph import ModelGraph

JOINS = ("sum", "mean", "concat")
"""`concat` is along the first size behind the batch: channels of images, features of vectors."""


def check_join(key: str, join: str) -> None:
    """Refuse what is no join.

    Raises:
        ConfigError: with those that there are.
    """
    if join not in JOINS:
        raise ConfigError(
            f"{key}: found {shown(join)}; expected one of {', '.join(JOINS)}.{did_you_mean(str(join), JOINS)} "
            f"Write {key}: sum."
        )


def joined(graph: ModelGraph, name: str, nodes: Sequence[fx.Node], join: str) -> fx.Node:
    """Return a node that joins others: x_1 + .. + x_n, that over n, or [x_1, .., x_n].

    Args:
        graph: gets the node.
        name: begins the ids of new nodes.
        nodes: of equal shapes, but for the first size where they are concatenated; a single one is what is returned.
        join: out of JOINS.

    Raises:
        InfeasibleModelError: shapes differ.
    """
    if len(nodes) == 1:
        return nodes[0]
    if join == "concat":
        return graph.call(name, torch.cat, [list(nodes), 1])
    total = nodes[0]
    for number, node in enumerate(nodes[1:], start=2):
        total = graph.call(name if number == len(nodes) else f"{name}_sum_{number}", torch.add, [total, node])
    return total if join == "sum" else graph.call(f"{name}_mean", torch.div, [total, len(nodes)])
