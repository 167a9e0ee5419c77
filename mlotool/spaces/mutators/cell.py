"""A cell: nodes that read earlier ones, each through an operation that is chosen."""

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any, ClassVar, NamedTuple

from torch import fx

from mlotool.core.errors import ConfigError
from mlotool.core.faults import shown
from mlotool.spaces.building import Build
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, check_candidates, check_join, joined
from mlotool.spaces.places import Place

ENDS = ("unread", "all")


class Cell(AbstractMutator):
    """Puts a cell in each place: nodes, each of which reads some earlier ones through an operation each.

        node_i = join over its reads r of operation_r(node_r),   cell = project(end over its ends)

    Decisions of node 0 of place 0 are `<name>_0_0_input_a`, `<name>_0_0_operation_a`, `.._b` and so on; with `tied`
    there is one cell for all places, and `<name>_0_input_a` is of its node 0. An input is a number: first those that
    the place reads, in their order, then the cell's nodes. At first `a` is number 0 and `b` is number 1.

    Args:
        name: of the decisions.
        at: the places, which may read several nodes; see `Target`.
        candidates: by name, what makes an operation; None reads a node as it is. It is given the settings of a place
            from the shape that it reads to the shape that the place returns: `stride`, `width`, .. (see `settings_of`).
        num_nodes: of a cell.
        num_inputs: how many each node reads.
        join: of what a node reads: `sum`, `mean` or `concat`.
        end: how the nodes at the end are joined.
        ends: which nodes these are: `unread`, those that no other reads, or `all`.
        project: makes what comes behind that join, and brings it to the shape that the place returns; None: nothing.
        tied: whether all places have the same cell.

    Raises:
        ConfigError: `concat` without `project`, whose result depends on how many nodes there are to join.

    Source: Zoph et al. 2018, NASNet (arXiv 1707.07012), section 3; Real et al. 2019, AmoebaNet (arXiv 1802.01548),
    section 3.1; Pham et al. 2018, ENAS (arXiv 1802.03268), section 2.3. Of the nodes that no other reads, the place's
    inputs are none: their shape may be another.

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> linear = torch.nn.Linear
        >>> cell = Cell("cell", "1", {"linear": linear, "same": None}, num_nodes=2, num_inputs=1, end="sum")
        >>> [each.id for each in Space(base, [cell], inputs=[4], decisions={"cell_0_1_input_a": 1}).nodes]
        ['input', '0', 'cell_0_0_a', 'cell_0_1_a', 'output']
    """

    factories: ClassVar[tuple[str, ...]] = ("candidates", "project")

    def __init__(
        self,
        name: str,
        at: Any,
        candidates: Mapping[Any, Build | None],
        num_nodes: int,
        num_inputs: int = 2,
        join: str = "sum",
        end: str = "concat",
        ends: str = "unread",
        project: Build | None = None,
        tied: bool = False,
    ) -> None:
        check_candidates("Cell", candidates)
        check_join("Cell: join", join)
        check_join("Cell: end", end)
        if ends not in ENDS:
            raise ConfigError(f"Cell: ends: found {shown(ends)}; expected one of {', '.join(ENDS)}. Write ends: all.")
        if "concat" in (join, end) and project is None:
            raise ConfigError(
                f"Cell: found join={join} and end={end} without project; expected a module behind what is "
                "concatenated, as its size depends on decisions. Write project: {_target_: torch.nn.Conv2d, "
                "kernel_size: 1}, or join: sum and end: sum."
            )
        are_whole = type(num_nodes) is int and type(num_inputs) is int
        if not are_whole or not 1 <= num_nodes <= 100 or not 1 <= num_inputs <= len(ascii_lowercase):
            raise ConfigError(
                f"Cell: found num_nodes={shown(num_nodes)} and num_inputs={shown(num_inputs)}; expected 1 to 100 and 1 "
                f"to {len(ascii_lowercase)}. Correct them."
            )
        self.name, self.at, self.candidates, self.project, self.tied = name, at, candidates, project, tied
        self.num_nodes, self.num_inputs, self.join, self.end, self.ends = num_nodes, num_inputs, join, end, ends

    def mutate(self, graph: ModelGraph) -> None:
        """Choose, and put the cells."""
        places = graph.find(self.at, of_some=self.tied)
        graph.check_room(len(places) * self.num_nodes * self.num_inputs)
        counts = [len(place.inputs) for place in places]
        if self.tied and len(set(counts)) > 1:
            raise ConfigError(
                f"tied: found places that read {', '.join(map(str, counts))} nodes; expected the same number for all, "
                "as they have one cell. Write tied: false, or another target."
            )
        if graph.is_shared and self.ends == "unread":
            raise ConfigError(
                "ends: found unread; in a shared space, which holds all models at once, expected what does not depend "
                "on the decisions: that all nodes of a cell are joined. Write ends: all."
            )
        for number, place in enumerate(places):
            name = f"{self.name}_{number}"
            with graph.beside(place):
                graph.put(place, self._cell(graph, place, name, self.name if self.tied else name))

    def _cell(self, graph: ModelGraph, place: Place, name: str, decisions: str) -> fx.Node:
        nodes, read = place.inputs, set[int]()
        for number in range(self.num_nodes):
            parts = []
            for position, letter in enumerate(ascii_lowercase[: self.num_inputs]):
                read_by = _Read(f"{decisions}_{number}", f"{name}_{number}_{letter}", letter, position % len(nodes))
                parts.append(self._part(graph, place, nodes, read, read_by))
            nodes.append(joined(graph, f"{name}_{number}", parts, self.join))
        first = len(place.inputs)
        ends = [node for number, node in enumerate(nodes) if number >= first and self._is_end(number, read)]
        end = joined(graph, f"{name}_end", ends, self.end)
        return end if self.project is None else graph.create(f"{name}_project", self.project, [end], place.output_shape)

    def _is_end(self, number: int, read: set[int]) -> bool:
        return self.ends == "all" or number not in read

    def _part(
        self, graph: ModelGraph, place: Place, nodes: Sequence[fx.Node], read: set[int], read_by: "_Read"
    ) -> fx.Node:
        def read_from(source: int) -> fx.Node:
            read.add(source)
            operation = f"{read_by.decisions}_operation_{read_by.letter}"
            return graph.select(operation, self.candidates, lambda value: operated(nodes[source], value))

        def operated(node: fx.Node, value: Any) -> fx.Node:
            build = self.candidates[value]
            return node if build is None else graph.create(read_by.node, build, [node], place.output_shape)

        sources = [*range(read_by.first, len(nodes)), *range(read_by.first)]
        return graph.select(f"{read_by.decisions}_input_{read_by.letter}", sources, read_from)


class _Read(NamedTuple):
    """One of what a node reads.

    Args:
        decisions: begins the names of its two.
        node: id of its operation.
        letter: its own.
        first: number of what is read where nothing is decided.
    """

    decisions: str
    node: str
    letter: str
    first: int
