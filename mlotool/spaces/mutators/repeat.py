"""Repeated blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le, MinLen

from mlotool.core.settings import target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator


@target("mutator")
@dataclass(eq=False)
class Repeat(AbstractMutator):
    """Repeats each place as often as is decided; 0 removes it.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places. Each copy has parameters of its own.

    Args:
        name: name with which the decisions begin.
        at: the places, which have to keep the shape; see `Target`.
        counts: the possible numbers of repetitions; the first one is the default.

    Source: Zhang et al. 2020, Retiarii, section 3.3; the depth of a stage in Tan et al. 2019 (MnasNet).

    Example:
        >>> def base():
        ...     return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 4))
        >>> depth = Repeat("depth", "1", [1, 2, 3])
        >>> [each.id for each in Space(base, [depth], inputs=[2], decisions={"depth_0": 3}).nodes]
        ['input', '0', '1', 'depth_0_1.1', 'depth_0_2.1', 'output']
    """

    name: str
    at: Any
    counts: Annotated[Sequence[Annotated[int, Ge(0), Le(1000)]], MinLen(1)]

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and repeat the places."""
        places = graph.find(self.at)
        # All are asked for before the first copy is made: too many are refused at once.
        asked = [list(graph.alternatives(f"{self.name}_{number}", self.counts)) for number, _ in enumerate(places)]
        copies = [sum(count - 1 for count in counts if count > 1) for counts in asked]
        graph.check_room(sum(count * len(place.nodes) for count, place in zip(copies, places, strict=True)))
        for number, place in enumerate(places):
            for count in graph.alternatives(f"{self.name}_{number}", self.counts):
                for copy in range(count - 1, 0, -1):
                    graph.repeat(place, f"{self.name}_{number}_{copy}")
                if count == 0:
                    graph.delete(place)
