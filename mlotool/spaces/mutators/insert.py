"""A module more."""

from collections.abc import Mapping
from typing import Any

from mlotool.core.settings import target
from mlotool.spaces.building import Build
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, check_candidates


@target("mutator")
class Insert(AbstractMutator):
    """Puts one of several modules behind each place.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places.

    Args:
        name: of the decisions.
        at: the places; see `Target`.
        candidates: by name, what makes a module that keeps the shape; None inserts nothing. It is given what the place
            returns: `num_features`, `in_channels`, ... (see `settings_of`).

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

    def __init__(self, name: str, at: Any, candidates: Mapping[str, Build | None]) -> None:
        check_candidates("Insert", candidates)
        self.name, self.at, self.candidates = name, at, candidates

    def mutate(self, graph: ModelGraph) -> None:
        """Choose, and insert."""
        for number, place in enumerate(graph.find(self.at)):
            for value in graph.alternatives(f"{self.name}_{number}", self.candidates):
                build = self.candidates[value]
                if build is not None:
                    graph.insert(place, build, f"{self.name}_{number}")
