"""A cell: nodes that read earlier ones, each through an operation that is chosen."""

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any, ClassVar

from torch import fx

from mlotool.core.errors import ConfigError
from mlotool.core.faults import shown
from mlotool.spaces.building import Build
from mlotool.spaces.decisions import choose
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.joins import check_join, joined
from mlotool.spaces.mutators.mutator import AbstractMutator, check_candidates
from mlotool.spaces.targets import Place

Reads = list[tuple[int, Build | None]]
"""What a node reads: numbers of earlier nodes, each with what makes an operation."""


class Cell(AbstractMutator):
    """Puts a cell in each place: nodes, each of which reads some earlier ones through an operation each.

        node_i = join over its reads r of operation_r(node_r),   cell = project(end over the nodes that no node reads)

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
        end: how the nodes that no other reads are joined.
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
        project: Build | None = None,
        tied: bool = False,
    ) -> None:
        check_candidates("Cell", candidates)
        check_join("Cell: join", join)
        check_join("Cell: end", end)
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
        self.num_nodes, self.num_inputs, self.join, self.end = num_nodes, num_inputs, join, end

    def mutate(self, graph: ModelGraph) -> None:
        """Choose, and put the cells."""
        places = graph.find(self.at)
        graph.check_room(len(places) * self.num_nodes * self.num_inputs)
        counts = [len(place.inputs) for place in places]
        if self.tied and len(set(counts)) > 1:
            raise ConfigError(
                f"tied: found places that read {', '.join(map(str, counts))} nodes; expected the same number for all, "
                "as they have one cell. Write tied: false, or another target."
            )
        names = [self.name if self.tied else f"{self.name}_{number}" for number, _ in enumerate(places)]
        cells = {name: self._chosen(name, count) for name, count in dict(zip(names, counts, strict=True)).items()}
        for number, (place, name) in enumerate(zip(places, names, strict=True)):
            with graph.beside(place):
                graph.put(place, self._cell(graph, place, f"{self.name}_{number}", cells[name]))

    def _chosen(self, name: str, num_sources: int) -> list[Reads]:
        return [
            [self._read(f"{name}_{node}", read, num_sources + node) for read in range(self.num_inputs)]
            for node in range(self.num_nodes)
        ]

    def _read(self, name: str, read: int, count: int) -> tuple[int, Build | None]:
        letter, first = ascii_lowercase[read], read % count
        source: int = choose(f"{name}_input_{letter}", [*range(first, count), *range(first)])
        return source, choose(f"{name}_operation_{letter}", self.candidates)

    def _cell(self, graph: ModelGraph, place: Place, name: str, cell: list[Reads]) -> fx.Node:
        nodes = place.inputs
        for number, reads in enumerate(cell):
            parts = []
            for letter, (source, build) in zip(ascii_lowercase, reads, strict=False):
                part = nodes[source]
                if build is not None:
                    part = graph.create(f"{name}_{number}_{letter}", build, [part], place.output_shape)
                parts.append(part)
            nodes.append(joined(graph, f"{name}_{number}", parts, self.join))
        read = {source for reads in cell for source, _ in reads}
        ends = [node for number, node in enumerate(nodes) if number >= len(place.inputs) and number not in read]
        end = joined(graph, f"{name}_end", ends, self.end)
        return end if self.project is None else graph.create(f"{name}_project", self.project, [end], place.output_shape)
