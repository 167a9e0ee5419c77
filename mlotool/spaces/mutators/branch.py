"""A layer becomes two branches."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mlotool.core.settings import target
from mlotool.spaces.building import Build
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, Candidates, Join, chosen, joined
from mlotool.spaces.places import Place


@target("mutator")
@dataclass(eq=False)
class Branch(AbstractMutator):
    """Adds a parallel branch to each place, with one of several modules, and joins both outputs.

        y = join(place(x), candidate(x))

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places.

    Args:
        name: name with which the decisions begin.
        at: the places, with one input each; see `Target`.
        candidates: by name, a function that makes a module from the settings of the place; None: no branch.
        join: `sum`, `mean` or `concat`.
        project: makes a module that brings a concatenation back to the shape of the place's output; None: no module.

    Source: Cai et al. 2018, Path-Level Network Transformation (arXiv 1806.02639), section 3.1. There, both branches
    begin as halves of the layer, so that the function does not change; here the model is trained from scratch.

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU())
        >>> branch = Branch("branch", {"type": "Linear"}, {"none": None, "linear": torch.nn.Linear})
        >>> [each.id for each in Space(base, [branch], inputs=[2], decisions={"branch_0": "linear"}).nodes]
        ['input', 'branch_0', '0', 'branch_0_join', '1', 'output']
    """

    factories: ClassVar[tuple[str, ...]] = ("candidates", "project")

    name: str
    at: Any
    candidates: Candidates
    join: Join = "sum"
    project: Build | None = None

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and add the branches."""
        for number, place in enumerate(graph.find(self.at)):
            name = f"{self.name}_{number}"
            for build in chosen(graph, name, self.candidates):
                self._put(graph, place, build, name)

    def _put(self, graph: ModelGraph, place: Place, build: Build, name: str) -> None:
        last, shape = place.nodes[-1], place.output_shape
        readers = list(last.users)
        with graph.beside(place):
            end = joined(graph, f"{name}_join", [last, graph.create(name, build, [place.input], shape)], self.join)
            if self.project is not None:
                end = graph.create(f"{name}_project", self.project, [end], shape)
        for reader in readers:
            graph.connect(reader, end, reader.all_input_nodes.index(last))
