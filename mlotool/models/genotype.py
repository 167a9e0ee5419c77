"""Genotypes: what a search leaves, as text that a configuration can hold."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.models.cell_operations import OPERATIONS

KINDS = ("normal", "reduction")
"""The two kinds of cells."""

Edge = tuple[str, int]
"""An operation and the number of the node that it reads; 0 and 1 are the outputs of the two cells before."""

Genotype = Mapping[str, Sequence[Edge]]
"""By kind of cell, two edges for each intermediate node, in the order of the nodes 2, 3, ..."""

EXAMPLE = "{normal: [[sep_conv_3x3, 0], [skip_connect, 1], ...], reduction: [...]}"


def num_edges(num_nodes: int) -> int:
    """Return the edges of a cell in the search: each intermediate node reads the two inputs and all nodes before.

    Example:
        >>> num_edges(4)
        14
    """
    return sum(2 + node for node in range(num_nodes))


def strongest_edges(logits: Tensor) -> list[Edge]:
    """Derive one kind of cell from its architecture's logits.

        p = softmax(logits, over operations);   strength of an edge = max over operations but `none` of p
        each node keeps its two strongest incoming edges, each with its strongest operation but `none`

    Args:
        logits: (e, 8), edges ordered by the node that they enter, then by the node that they leave.

    Returns:
        Two edges for each node, in the order of the nodes they leave.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 2.4.
    """
    probability = torch.softmax(logits.detach(), dim=1)
    strength, choice = probability[:, 1:].max(dim=1)  # `none` is the first
    edges: list[Edge] = []
    start = 0
    while start < len(logits):
        count = 2 + len(edges) // 2
        kept = sorted(strength[start : start + count].topk(2).indices.tolist())
        edges += [(OPERATIONS[1 + int(choice[start + source])], source) for source in kept]
        start += count
    return edges


def random_edges(num_nodes: int) -> list[Edge]:
    """Draw two different inputs for each node, each with any operation but `none`; from torch's global generator."""
    edges: list[Edge] = []
    for node in range(num_nodes):
        sources = sorted(torch.randperm(2 + node)[:2].tolist())
        edges += [(OPERATIONS[int(torch.randint(1, len(OPERATIONS), ()))], source) for source in sources]
    return edges


def as_text(genotype: Genotype) -> str:
    """Return a genotype as text that stands in YAML and on a command line.

    Example:
        >>> as_text({"normal": [("skip_connect", 0), ("sep_conv_3x3", 1)], "reduction": []})
        '{normal: [[skip_connect, 0], [sep_conv_3x3, 1]], reduction: []}'
    """
    cells = (f"{kind}: [{', '.join(f'[{name}, {source}]' for name, source in genotype[kind])}]" for kind in KINDS)
    return f"{{{', '.join(cells)}}}"


def checked_genotype(genotype: Mapping[str, Sequence[Sequence[object]]]) -> dict[str, list[Edge]]:
    """Return a genotype as it came out of a configuration, with every edge checked.

    Raises:
        ConfigError: it has other cells than `normal` and `reduction`, an odd number of edges, an unknown operation, or
            an edge that does not come from an earlier node.
    """
    if not isinstance(genotype, Mapping) or set(genotype) != set(KINDS):
        found = sorted(genotype) if isinstance(genotype, Mapping) else genotype
        raise ConfigError(f"genotype: found {found!r}; expected `random`, or both cells. Write genotype={EXAMPLE}.")
    if len(genotype["normal"]) != len(genotype["reduction"]) or len(genotype["normal"]) % 2:
        lengths = ", ".join(f"{len(genotype[kind])} ({kind})" for kind in KINDS)
        raise ConfigError(
            f"genotype: found {lengths} edges; expected two for each node, as many in both. Write genotype={EXAMPLE}."
        )
    return {kind: [_edge(kind, number, edge) for number, edge in enumerate(genotype[kind])] for kind in KINDS}


def _edge(kind: str, number: int, edge: Sequence[object]) -> Edge:
    key, last = f"genotype.{kind}[{number}]", 1 + number // 2
    if len(edge) != 2:
        raise ConfigError(f"{key}: found {edge!r}; expected an operation and a node. Write [sep_conv_3x3, 0].")
    name, source = edge
    if name not in OPERATIONS:
        raise ConfigError(
            f"{key}: found the operation {name!r}; expected one of {', '.join(OPERATIONS)}."
            f"{did_you_mean(str(name), OPERATIONS)} Correct the name."
        )
    if not isinstance(source, int) or not 0 <= source <= last:
        raise ConfigError(f"{key}: found the node {source!r}; expected 0 to {last}, as node {last + 1} reads it.")
    return str(name), source
