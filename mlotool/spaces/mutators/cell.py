"""A cell: nodes that read earlier ones, each through an operation that is chosen."""

from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from torch import fx

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import target
from mlotool.spaces.building import Build
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, Candidates, Join, joined
from mlotool.spaces.places import Place


@target("mutator")
@dataclass(eq=False)
class Cell(AbstractMutator):
    """Puts a cell in each place: nodes that read earlier nodes through operations.

        node_i = join over its reads r of operation_r(node_r),   cell = project(end over its ends)

    The decisions of node 0 of place 0 are `<name>_0_0_input_a`, `<name>_0_0_operation_a`, `.._b` and so on. With
    `tied`, all places have the same cell, and the decisions of its node 0 are `<name>_0_input_a` and so on. An input is
    a number: first the inputs of the place, in their order, then the cell's nodes. By default `a` is number 0 and `b`
    is number 1.

    Args:
        name: name with which the decisions begin.
        at: the places, which may read several nodes; see `Target`.
        candidates: by name, a function that makes an operation; None passes the node on as it is. The function gets
            settings that lead from the shape that is read to the place's output shape: `stride`, `width`, .. (see
            `settings_of`).
        num_nodes: number of nodes of a cell.
        num_inputs: number of earlier nodes that each node reads.
        join: how a node joins its inputs: `sum`, `mean` or `concat`.
        end: how the nodes at the end are joined.
        ends: the nodes at the end: `unread`, those that no other node reads, or `all`.
        project: makes a module that brings the joined nodes to the shape of the place's output; None: no module.
        tied: whether all places have the same cell.

    Raises:
        ConfigError: `concat` without `project`, whose result depends on how many nodes there are to join.

    Source: Zoph et al. 2018, NASNet (arXiv 1707.07012), section 3; Real et al. 2019, AmoebaNet (arXiv 1802.01548),
    section 3.1; Pham et al. 2018, ENAS (arXiv 1802.03268), section 2.3. The place's inputs do not count among the
    unread nodes, since their shapes may differ.

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> linear = torch.nn.Linear
        >>> cell = Cell("cell", "1", {"linear": linear, "same": None}, num_nodes=2, num_inputs=1, end="sum")
        >>> [each.id for each in Space(base, [cell], inputs=[4], decisions={"cell_0_1_input_a": 1}).nodes]
        ['input', '0', 'cell_0_0_a', 'cell_0_1_a', 'output']
    """

    factories: ClassVar[tuple[str, ...]] = ("candidates", "project")

    name: str
    at: Any
    candidates: Candidates
    num_nodes: Annotated[int, Ge(1), Le(100)]
    num_inputs: Annotated[int, Ge(1), Le(len(ascii_lowercase))] = 2
    join: Join = "sum"
    end: Join = "concat"
    ends: Literal["unread", "all"] = "unread"
    project: Build | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if "concat" in (self.join, self.end) and self.project is None:
            fault = (
                f"Cell: found join={self.join} and end={self.end} without project, although decisions change the size"
            )
            raise ConfigError(f"{fault}. Write project, or join: sum and end: sum.")

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and put the cells in their places."""
        places = graph.find(self.at, of_some=self.tied)
        graph.check_room(len(places) * self.num_nodes * self.num_inputs)
        counts = [len(place.inputs) for place in places]
        is_right, expected = not self.tied or len(set(counts)) == 1, "places that read the same number of nodes"
        require(is_right, "tied", counts, expected, "Write tied: false, or another target.")
        require(not graph.is_shared or self.ends == "all", "ends", self.ends, "all in a shared space")
        for number, place in enumerate(places):
            name = f"{self.name}_{number}"
            with graph.beside(place):
                graph.put(place, self._cell(graph, place, name, self.name if self.tied else name))

    def _cell(self, graph: ModelGraph, place: Place, name: str, decisions: str) -> fx.Node:
        nodes, read, num_sources = place.inputs, set[int](), len(place.inputs)
        for number in range(self.num_nodes):
            parts = []
            for position, letter in enumerate(ascii_lowercase[: self.num_inputs]):
                names = f"{decisions}_{number}_input_{letter}", f"{decisions}_{number}_operation_{letter}"
                first = position % len(nodes)
                operated = partial(self._operated, graph, place, f"{name}_{number}_{letter}", names[1], nodes, read)
                parts.append(graph.select(names[0], [*range(first, len(nodes)), *range(first)], operated))
            nodes.append(joined(graph, f"{name}_{number}", parts, self.join))
        own = [number for number in range(num_sources, len(nodes)) if self.ends == "all" or number not in read]
        end = joined(graph, f"{name}_end", [nodes[number] for number in own], self.end)
        return end if self.project is None else graph.create(f"{name}_project", self.project, [end], place.output_shape)

    def _operated(
        self, graph: ModelGraph, place: Place, name: str, choice: str, nodes: list[fx.Node], read: set[int], source: int
    ) -> fx.Node:
        """Return what an operation that is chosen makes of one of the nodes."""
        read.add(source)

        def operated(value: Any) -> fx.Node:
            build = self.candidates[value]
            return nodes[source] if build is None else graph.create(name, build, [nodes[source]], place.output_shape)

        return graph.select(choice, self.candidates, operated)
