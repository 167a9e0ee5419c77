"""What a mutator is, what its candidates are, and how several nodes are joined."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from mlotool.spaces.building import Build
from mlotool.spaces.model_graph import ModelGraph


class AbstractMutator(ABC):
    """Base class of mutators, which change the graph of a model as decisions say.

    A mutator of your own has a `name` and a method `mutate`. The method finds places (`graph.find`), decides
    (`choose`), and changes the places by operations of the graph: `replace`, `insert`, `delete`, `connect`, `create`,
    `call`, `repeat`.

    Attributes:
        name: the text with which the names of its decisions and nodes begin.

    Example:
        >>> class Drop(AbstractMutator):
        ...     '''Leaves layers out.'''
        ...     def __init__(self, name, at):
        ...         self.name, self.at = name, at
        ...     def mutate(self, graph):
        ...         for number, place in enumerate(graph.find(self.at)):
        ...             if choose(f"{self.name}_{number}", ["keep", "drop"]) == "drop":
        ...                 graph.delete(place)
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> Space(base, [Drop("drop", "1")], inputs=[2], decisions={"drop_0": "drop"})
        Space(
          (0): Linear(in_features=2, out_features=2, bias=True)
        )
    """

    name: str
    factories: ClassVar[tuple[str, ...]] = ("candidates",)
    """Settings that are handed over as functions: what they describe is built where it is chosen."""

    @abstractmethod
    def mutate(self, graph: ModelGraph) -> None:
        """Change the graph."""


# By name, what makes a module; None is nothing, or what stands there.
Candidates = Mapping[Any, Build | None]


def chosen(graph: ModelGraph, name: str, candidates: Candidates) -> Iterator[Build]:
    """Yield what makes the module that is decided, if there is one; in a shared space that of each candidate."""
    for value in graph.alternatives(name, candidates):
        build = candidates[value]
        if build is not None:
            yield build


# `concat` is along the first size behind the batch: channels of images, features of vectors.
Join = Literal["sum", "mean", "concat"]


def joined(graph: ModelGraph, name: str, nodes: Sequence[fx.Node], join: Join) -> fx.Node:
    """Return a node that joins others: x_1 + .. + x_n, that over n, or [x_1, .., x_n].

    Args:
        graph: gets the node.
        name: begins the ids of new nodes.
        nodes: of equal shapes, but for the first size where they are concatenated; a single one is what is returned.
        join: how.

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
