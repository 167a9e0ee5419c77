"""One more edge."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.settings import Whole, target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator


@target("mutator")
@dataclass(eq=False)
class Link(AbstractMutator):
    """Adds one earlier node to the inputs of each place.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places. Each is the number of a node among `sources`
    that the place does not read yet, counted backward from the place; 0 adds no node.

    Args:
        name: name with which the decisions begin.
        at: the places: modules that take any number of tensors of one shape; see `Target`.
        sources: the nodes that may be read; None: all. Nodes after a place, or with another shape than its inputs, are
            left out.
        most: the most candidates; the nearest nodes are taken.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3 (add connection).

    Example:
        >>> from mlotool.models import SharedWeightNetwork
        >>> base = SharedWeightNetwork([4], 2, num_hidden=2)
        >>> link = Link("link", "outputs.0", "hidden.*")
        >>> found = Space(base, [link], inputs=[4], leaves=["hidden.*", "outputs.*"], decisions={"link_0": 1})
        >>> [each.inputs for each in found.nodes if each.id == "outputs.0"]
        [('hidden.0', 'hidden.1')]
    """

    name: str
    at: Any
    sources: Any = None
    most: Whole = 1000

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and connect the places."""
        every = list(graph.graph.nodes)
        sources = every if self.sources is None else [place.nodes[-1] for place in graph.find(self.sources)]
        for number, place in enumerate(graph.find(self.at)):
            reader = place.nodes[0]
            read = reader.all_input_nodes
            new = [source for source in reversed(sources) if source not in read and graph.fits(reader, read[0], source)]
            for chosen in graph.alternatives(f"{self.name}_{number}", range(min(len(new), self.most) + 1)):
                if chosen:
                    graph.connect(reader, new[chosen - 1], len(read))
