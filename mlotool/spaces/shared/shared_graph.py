"""A graph that holds all models of a space: where they differ, a switch reads what each of them has there."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces.alternatives import V
from mlotool.spaces.building import Build
from mlotool.spaces.decisions import Value, deciding
from mlotool.spaces.fitting import dtype_at
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.node_order import last_of
from mlotool.spaces.places import blocks_of
from mlotool.spaces.room import Room
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.shared.path_table import Condition, PathTable
from mlotool.spaces.shared.shared_modules import SharedModules
from mlotool.spaces.shared.shared_places import SharedPlaces
from mlotool.spaces.shared.switch import Switch
from mlotool.spaces.targets import Place, node_id
from mlotool.spaces.tracing import BLOCKS, CALLS, ID, OWNER

CONDITION = "condition"
"""What `node.meta` of a new node holds: the decisions with which it was made."""

Edges = dict[fx.Node, tuple[Any, Any]]
"""By node, what it is called with."""


class _SharedRoom(Room):
    """Names of new nodes: two that no model has together may have one name."""

    _modules: SharedModules

    def _is_taken(self, name: str) -> bool:
        known: list[Condition] = [each.meta.get(CONDITION, ()) for each in self._graph.nodes if node_id(each) == name]
        if not known:
            return self._modules.has(name)
        now = dict(self._modules.condition)
        return not all(any(now.get(key, value) != value for key, value in each) for each in known)


class SharedGraph(ModelGraph):
    """A traced model, to which mutators do all that they may do, side by side.

    For each candidate of a decision a mutator changes the graph as it was before. Then every node reads what it has
    read in all of the changed graphs; where they differ it reads a switch between them. That is how a compiler brings
    the branches of a program together (static single assignment).

    Args: as for `ModelGraph`.

    Attributes:
        table: the decisions.

    Source: Zhang et al. 2020, Retiarii, section 5 (super-graphs); Cytron et al. 1991, Efficiently Computing Static
    Single Assignment Form.
    """

    is_shared = True
    modules: SharedModules
    _modules_kind = SharedModules
    _places_kind = SharedPlaces
    _room_kind = _SharedRoom

    def __init__(
        self, root: nn.Module, graph: fx.Graph, shapes: Shapes, seed: int, anew: Callable[[], nn.Module] | None
    ) -> None:
        super().__init__(root, graph, shapes, seed, anew)
        self.table = PathTable()
        self._switches: dict[tuple[str, tuple[fx.Node, ...]], fx.Node] = {}

    def alternatives(self, name: str, candidates: Iterable[V]) -> Iterator[V]:
        """Yield each candidate, and bring together what the body of the loop makes of the graph for each."""
        values, outside = tuple(candidates), self.modules.condition
        self.table.note(self._mutator, name, values, outside)
        before = self._edges(self.graph.nodes)
        found: list[Edges] = []
        parked: Edges = {}
        for value in values:
            self.modules.condition = (*outside, (name, value))
            yield value
            found.append(self._taken_back(before))
            # Nodes that are new read nothing meanwhile: the next candidate is not to change them.
            new = self._edges(each for each in self.graph.nodes if each not in before and each not in parked)
            parked |= new
            for node in new:
                node.args, node.kwargs = (), {}
        self.modules.condition = outside
        self._read(parked, parked)
        self._bring_together(name, values, before, found)

    def select(self, name: str, candidates: Iterable[V], make: Callable[[V], fx.Node]) -> fx.Node:
        """Return a switch between the nodes that are made for the candidates."""
        values = tuple(candidates)
        return self._switch(name, values, [make(value) for value in self.alternatives(name, values)])

    @contextmanager
    def by(self, mutator: str) -> Iterator[None]:
        """Let a mutator work on the graph; what does not fit is a mistake here, and no model that is left out.

        Raises:
            ConfigError: a candidate does not fit, or the mutator decides in another way than by `alternatives`.
        """
        try:
            with super().by(mutator), deciding(_refuse):
                yield
        except InfeasibleModelError as error:
            made = ", ".join(f"{name}: {value}" for name, value in self.modules.condition)
            raise ConfigError(
                f"{error} A shared space has all candidates at once; expected that each of them fits. Take out what "
                f"does not{f' ({made})' if made else ''}, or search without shared."
            ) from error

    def _replace_module(self, place: Place, node: fx.Node, build: Build, settings: dict[str, Any]) -> fx.Node:
        path = self.modules.put(str(node.target), build, settings, dtype_at([*place.inputs, node]))
        readers = list(node.users)
        with self.graph.inserting_after(node):
            new = self.graph.create_node("call_module", path, node.args, node.kwargs)
        new.meta |= {key: node.meta[key] for key in (ID, OWNER, CALLS, BLOCKS) if key in node.meta}
        self._note("replace", place.id, is_rewired=True)
        self._shapes.infer_new(new)
        self._let_read(readers, node, new)
        return new

    def replace(self, place: Place, build: Build, name: str) -> fx.Node:
        """Put a new module beside nodes, which is read in their stead.

        Raises:
            ConfigError: another mutator has several modules there.
        """
        if any(isinstance(each.target, Switch) and node_id(each) == place.id for each in place.nodes):
            raise ConfigError(
                f"at: found '{place.id}', where another mutator decides what stands there; expected one decision about "
                "it in a shared space. Write all candidates in one mutator, or search without shared."
            )
        return super().replace(place, build, name)

    def _created(self, node: fx.Node, name: str) -> fx.Node:
        node.meta[CONDITION] = self.modules.condition
        return super()._created(node, name)

    def _erase(self, place: Place) -> None:
        """Leave nodes, which other models have."""

    def _edges(self, nodes: Iterable[fx.Node]) -> Edges:
        return {node: (node.args, node.kwargs) for node in nodes}

    def _taken_back(self, before: Edges) -> Edges:
        """Let nodes read what they have read before, and return what the changed ones read now."""
        now = self._edges(before)
        changed = {node: edges for node, edges in now.items() if edges != before[node]}
        self._read(changed, before)
        return changed

    def _read(self, nodes: Iterable[fx.Node], edges: Edges) -> None:
        for node in nodes:
            node.args, node.kwargs = edges[node]
        self._shapes.note(nodes)

    def _bring_together(self, name: str, values: tuple[Value, ...], before: Edges, found: list[Edges]) -> None:
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        for node in sorted(set().union(*found), key=order.__getitem__):
            every = [each.get(node, before[node]) for each in found]
            forms, read = zip(*map(_opened, every), strict=True)
            if any(each != forms[0] for each in forms):
                raise ConfigError(
                    f"'{node_id(node)}' reads another number of nodes with other candidates of '{name}'; expected "
                    "that a shared space's decisions leave it. Join what it reads before, as Branch does, or search "
                    "without shared."
                )
            sources = [self._switch(name, values, each) for each in zip(*read, strict=True)]
            together = _closed(every[0], sources)
            self._read([node], {node: together})

    def _switch(self, name: str, values: tuple[Value, ...], sources: Iterable[fx.Node]) -> fx.Node:
        """Return what stands for one of some nodes; the node itself, where they are one."""
        found = tuple(sources)
        if len(set(found)) == 1:
            return found[0]
        if (name, found) not in self._switches:
            with self.graph.inserting_after(last_of(self.graph, found)):
                node = self.graph.call_function(Switch(name, values), (list(found),))
            ids = {node_id(each) for each in found}
            own = ids.pop() if len(ids) == 1 else f"{name}:choice"
            blocks = blocks_of(Place(own, found, None, None, None))
            node.meta |= {ID: own, OWNER: "", BLOCKS: blocks, CONDITION: self.modules.condition}
            self._note("create", own, is_rewired=True)
            self._shapes.infer_new(node)
            self._switches[name, found] = node
        return self._switches[name, found]


def _refuse(name: str, candidates: tuple[Value, ...]) -> Value:
    raise ConfigError(
        f"decisions.{name}: found `choose` in a mutator, or in the constructor of a candidate, which takes one of "
        f"{len(candidates)} candidates; expected all of them in a shared space. Write `for value in "
        "graph.alternatives(name, candidates):` in the mutator, or search without shared."
    )


def _opened(edges: tuple[Any, Any]) -> tuple[Any, list[fx.Node]]:
    """Return what a node is called with, without the nodes, and these."""
    read: list[fx.Node] = []

    def take(node: fx.Node) -> str:
        read.append(node)
        return "node"

    return fx.node.map_arg(edges, take), read


def _closed(edges: tuple[Any, Any], read: Iterable[fx.Node]) -> tuple[Any, Any]:
    """Return what a node is called with, but for the nodes, which are others."""
    nodes = iter(read)
    found: tuple[Any, Any] = fx.node.map_arg(edges, lambda _: next(nodes))
    return found
