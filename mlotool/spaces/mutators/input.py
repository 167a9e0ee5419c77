"""Which earlier node is read."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.settings import Count, target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator


@target("mutator")
@dataclass(eq=False)
class Input(AbstractMutator):
    """Lets each place read one of several earlier nodes.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places: the number of the node, of those that are
    described, counted from the place backwards; 0 keeps what the place reads.

    Args:
        name: of the decisions.
        at: the places, with one input each; see `Target`.
        sources: the nodes that may be read; those behind a place, and of another shape than it reads, are none.
        most: how many are candidates at most, the nearest ones.

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
        """Choose, and connect."""
        sources = graph.find(self.sources)
        for number, place in enumerate(graph.find(self.at)):
            reader, now = graph.reader_of(place)
            earlier = [other.nodes[-1] for other in reversed(sources) if graph.fits(reader, now, other.nodes[-1])]
            candidates = [now, *earlier][: self.most]
            for chosen in graph.alternatives(f"{self.name}_{number}", range(len(candidates))):
                if chosen:
                    graph.connect(reader, candidates[chosen])
