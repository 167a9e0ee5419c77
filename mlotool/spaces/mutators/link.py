"""An edge more."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.settings import Whole, target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator


@target("mutator")
@dataclass(eq=False)
class Link(AbstractMutator):
    """Lets each place read one earlier node more, beside those that it reads.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places: the number of the node, of those that are
    described and not read yet, counted from the place backwards; 0 is none.

    Args:
        name: of the decisions.
        at: the places: modules that take any number of tensors of one shape; see `Target`.
        sources: the nodes that may be read; None: all. Those behind a place, and of another shape than it reads, are
            none.
        most: how many are candidates at most, the nearest ones.

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
        """Choose, and connect."""
        every = list(graph.graph.nodes)
        sources = every if self.sources is None else [place.nodes[-1] for place in graph.find(self.sources)]
        for number, place in enumerate(graph.find(self.at)):
            reader = place.nodes[0]
            read = reader.all_input_nodes
            new = [source for source in reversed(sources) if source not in read and graph.fits(reader, read[0], source)]
            for chosen in graph.alternatives(f"{self.name}_{number}", range(min(len(new), self.most) + 1)):
                if chosen:
                    graph.connect(reader, new[chosen - 1], len(read))
