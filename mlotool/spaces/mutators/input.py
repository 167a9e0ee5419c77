"""Which earlier node is read."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.settings import Count, target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator


@target("mutator")
@dataclass(eq=False)
class Input(AbstractMutator):
    """Changes the input of each place to one of several earlier nodes.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places. Each is the number of a node among `sources`,
    counted backward from the place; 0 keeps the place's input.

    Args:
        name: name with which the decisions begin.
        at: the places, with one input each; see `Target`.
        sources: the nodes that may be read; nodes after a place, or with another shape than its input, are left out.
        most: the most candidates; the nearest nodes are taken.

    Source: Zhang et al. 2020, Retiarii, section 3.3 (input mutator).

    Example:
        >>> base = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        >>> skip = Input("skip", "2", {"type": "Linear"})
        >>> [each.id for each in Space(base, [skip], inputs=[4], decisions={"skip_0": 1}).nodes]
        ['input', '0', '2', 'output']
    """

    name: str
    at: Any
    sources: Any
    most: Count = 10

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and connect the places."""
        sources = graph.find(self.sources)
        for number, place in enumerate(graph.find(self.at)):
            reader, now = graph.reader_of(place)
            earlier = [other.nodes[-1] for other in reversed(sources) if graph.fits(reader, now, other.nodes[-1])]
            candidates = [now, *earlier][: self.most]
            for chosen in graph.alternatives(f"{self.name}_{number}", range(len(candidates))):
                if chosen:
                    graph.connect(reader, candidates[chosen])
