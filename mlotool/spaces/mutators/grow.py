"""A model that grows by one mutation after the other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from mlotool.core.arguments import require
from mlotool.core.settings import target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator


@target("mutator")
@dataclass(eq=False)
class Grow(AbstractMutator):
    """Applies one of several mutators to one of the places, and repeats this with the places that there are then.

    The decisions of step 3 are `<name>_3`, the mutator; `<name>_3_place`, the number of the place among the current
    places in the order of computation; and the mutator's own decisions, which begin with `<name>_3_<mutator>`.

    Args:
        name: name with which the decisions begin.
        at: the places; see `Target`. They include places that earlier steps have made.
        mutators: by name, a function that makes a mutator from a name and a place; None changes nothing.
        steps: number of steps.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3; Cai et al. 2018,
    Path-Level Network Transformation (arXiv 1806.02639); Real et al. 2017, Large-Scale Evolution (arXiv 1703.01041).

    Example:
        >>> from functools import partial
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        >>> deepen = partial(Insert, candidates={"linear": torch.nn.Linear})
        >>> grow = Grow("grow", {"type": "Linear"}, {"none": None, "deepen": deepen}, steps=2)
        >>> decisions = {"grow_0": "deepen", "grow_1": "deepen", "grow_1_place": 1}
        >>> [each.id for each in Space(base, [grow], inputs=[2], decisions=decisions).nodes]
        ['input', '0', 'grow_0_deepen_0', 'grow_1_deepen_0', '1', 'output']
    """

    factories: ClassVar[tuple[str, ...]] = ("mutators",)
    name: str
    at: Any
    mutators: Mapping[str, Callable[..., AbstractMutator] | None]
    steps: Annotated[int, Ge(0), Le(1000)]

    def mutate(self, graph: ModelGraph) -> None:
        """Decide on a mutator and a place, and apply the mutator; `steps` times."""
        for step in range(self.steps):
            name = f"{self.name}_{step}"
            for which in graph.alternatives(name, self.mutators):
                make = self.mutators[which]
                if make is None:
                    continue
                places = graph.find(self.at)
                for number in graph.alternatives(f"{name}_place", range(len(places))):
                    # Each mutator's decisions have names of their own: in a study, one name has one set of candidates.
                    made = make(name=f"{name}_{which}", at=places[number])
                    expected = "what makes a mutator of a name and a place, such as mlotool.spaces.Insert"
                    require(isinstance(made, AbstractMutator), f"mutators.{which}", made, expected)
                    made.mutate(graph)
