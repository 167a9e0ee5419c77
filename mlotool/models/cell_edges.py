"""Which edges of a cell a search keeps."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, target


@target("module")
class StrongestEdges:
    """Derives cells from the probabilities of the operations on their edges: each node keeps its strongest edges.

        strength of an edge = max over operations but `none` of p
        each node keeps its two strongest incoming edges, each with its strongest operation but `none`

    The decisions of a kind of cells are `<kind>_0`, `<kind>_1`, .., one for each edge, ordered by the node that it
    enters, then by the node that it leaves; each node reads both inputs of the cell and all nodes before it.

    Args:
        none: the candidate that is no connection, which stands on the edges that are not kept.
        num_kept: edges of a node.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 2.4.

    Example:
        >>> import torch
        >>> operations = ("none", "skip", "pool")
        >>> edges = [[0.1, 0.8, 0.1], [0.9, 0.1, 0.0], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]
        >>> probabilities = {f"normal_{number}": torch.tensor(edge) for number, edge in enumerate(edges)}
        >>> found = StrongestEdges()(dict.fromkeys(probabilities, operations), probabilities)
        >>> list(found.values())
        ['skip', 'skip', 'pool', 'skip', 'none']
    """

    def __init__(self, none: str = "none", num_kept: Count = 2) -> None:
        self.none, self.num_kept = none, num_kept

    def __call__(
        self, candidates: Mapping[str, Sequence[str | int]], probabilities: Mapping[str, Tensor]
    ) -> dict[str, str | int]:
        """Return a candidate for each decision.

        Args:
            candidates: by decision.
            probabilities: (k,) of them, by decision.

        Raises:
            ConfigError: the edges of a kind make no cell, or `none` is not among the candidates.
        """
        found: dict[str, str | int] = {}
        for kind in dict.fromkeys(name.rpartition("_")[0] for name in candidates):
            edges = [name for name in candidates if name.rpartition("_")[0] == kind]
            for incoming in _by_node(kind, edges):
                best = {name: self._strongest(name, candidates[name], probabilities[name]) for name in incoming}
                kept = sorted(incoming, key=lambda name: best[name][0], reverse=True)[: self.num_kept]
                found |= {name: best[name][1] if name in kept else self.none for name in incoming}
        return found

    def _strongest(self, name: str, candidates: Sequence[str | int], probability: Tensor) -> tuple[float, str | int]:
        if self.none not in candidates:
            raise ConfigError(
                f"rule.none: found '{self.none}', which is no candidate of '{name}' "
                f"({', '.join(map(str, candidates))}); expected the one that is no connection. Correct it."
            )
        strengths = zip(probability.tolist(), candidates, strict=True)
        return max((each for each in strengths if each[1] != self.none), key=lambda each: each[0])


def _by_node(kind: str, edges: Sequence[str]) -> list[Sequence[str]]:
    """Return the edges of a cell by the node that they enter: two for the first node, three for the next one, ..."""
    nodes: list[Sequence[str]] = []
    start = 0
    while start < len(edges):
        nodes.append(edges[start : start + 2 + len(nodes)])
        start += len(nodes[-1])
    if len(nodes[-1]) != 1 + len(nodes):
        raise ConfigError(
            f"rule: found {len(edges)} decisions '{kind}_0', '{kind}_1', ..; expected one for each edge of a cell: 2, "
            "5, 9, 14, .. of 1, 2, 3, 4, .. nodes. Correct the mutator's places, or take another rule."
        )
    return nodes
