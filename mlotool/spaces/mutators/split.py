"""A module on an edge."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.settings import target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, Candidates, chosen


@target("mutator")
@dataclass(eq=False)
class Split(AbstractMutator):
    """Inserts one of several modules into one of the edges that lead to each place.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places. If a module is inserted, `<name>_0_input` is
    the number of the edge, counted over the edges to the place's nodes in their order.

    Args:
        name: name with which the decisions begin.
        at: the places; see `Target`.
        candidates: by name, a function that makes a module that keeps the shape; None inserts nothing.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3 (insert node).

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> split = Split("split", "1", {"none": None, "tanh": torch.nn.Tanh})
        >>> [each.id for each in Space(base, [split], inputs=[2], decisions={"split_0": "tanh"}).nodes]
        ['input', '0', 'split_0', '1', 'output']
    """

    name: str
    at: Any
    candidates: Candidates

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and insert the modules."""
        for number, place in enumerate(graph.find(self.at)):
            name, sources = f"{self.name}_{number}", set(place.inputs)
            every = [(node, i, source) for node in place.nodes for i, source in enumerate(node.all_input_nodes)]
            edges = [edge for edge in every if edge[2] in sources]
            for build in chosen(graph, name, self.candidates):
                for edge in graph.alternatives(f"{name}_input", range(len(edges))):
                    reader, position, source = edges[edge]
                    with graph.beside(place):
                        graph.connect(reader, graph.create(name, build, [source]), position)
