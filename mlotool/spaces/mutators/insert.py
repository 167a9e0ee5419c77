"""One more module."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.settings import target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, Candidates, chosen


@target("mutator")
@dataclass(eq=False)
class Insert(AbstractMutator):
    """Inserts one of several modules after each place.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places.

    Args:
        name: name with which the decisions begin.
        at: the places; see `Target`.
        candidates: by name, a function that makes a module that keeps the shape; None inserts nothing. The function
            gets the sizes of the place's output: `num_features`, `in_channels`, ... (see `settings_of`).

    Source: Zhang et al. 2020, Retiarii, section 3.3 (inserting mutator).

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU())
        >>> norm = Insert("norm", {"type": "Linear"}, {"none": None, "layer": torch.nn.LayerNorm})
        >>> Space(base, [norm], inputs=[2], decisions={"norm_0": "layer"})
        Space(
          (0): Linear(in_features=2, out_features=4, bias=True)
          (1): ReLU()
          (norm_0): LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)
        )
    """

    name: str
    at: Any
    candidates: Candidates

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and insert the modules."""
        for number, place in enumerate(graph.find(self.at)):
            for build in chosen(graph, f"{self.name}_{number}", self.candidates):
                graph.insert(place, build, f"{self.name}_{number}")
