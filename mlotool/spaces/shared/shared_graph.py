"""A graph that holds all models of a space: where they differ, a switch reads what each of them has there."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import fx, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces.building import Build, NewModules, accepted, dtype_at
from mlotool.spaces.decisions import Value, deciding
from mlotool.spaces.model_graph import ModelGraph, V
from mlotool.spaces.places import Place, Places, Target
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.shared.paths import Condition, PathTable
from mlotool.spaces.shared.super_graph import Switch, sources_of, switch_of
from mlotool.spaces.tracing import BLOCKS, CALLS, ID, OWNER, last_of, node_id, nodes_in


class SharedPlaces(Places):
    """Finds what targets describe, in a graph that holds all models of a space.

    What stands for one of several modules of one id is a place of this id, if all of them are as described.
    """

    def every(self) -> Iterator[Place]:
        """Yield each node as a place, then each module of the base whose forward is several nodes."""
        return (each for each in super().every() if MARK not in each.id)

    def _fitting(self, target: Target, of_some: bool) -> Iterator[Place]:
        computed = always_computed(self._graph)
        choices = {node_id(node): node for node in self._graph.nodes if switch_of(node) is not None}
        chosen: dict[str, list[fx.Node]] = {}
        for place in super()._fitting(target, of_some):
            last = place.nodes[-1]
            if switch_of(last) is not None and len(place.nodes) == 1:
                continue
            if len(place.nodes) == 1 and place.id in choices:
                chosen.setdefault(place.id, []).append(last)
            elif of_some or last in computed:
                yield place
            else:
                raise _refusal(place.id)
        for name, nodes in chosen.items():
            members = [node for node in self._graph.nodes if node_id(node) == name and node is not choices[name]]
            if set(members) != set(nodes) or not (of_some or choices[name] in computed):
                raise _refusal(name)
            yield Place.of(name, (*members, choices[name]), None)


def always_computed(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that every model of a shared graph computes, whatever was decided."""
    needed: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if switch_of(node) is not None and node.args:
            below = frozenset.intersection(*(needed[source] for source in sources_of(node)))
        else:
            below = frozenset[fx.Node]().union(*(needed[source] for source in node.all_input_nodes))
        needed[node] = below | {node}
    return set(needed[next(iter(reversed(graph.nodes)))])


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"at: found '{name}', which only some models of the space have, or which is as described in some of them "
        "alone; expected places that all models of a shared space have. Name places by their paths, or let this "
        "mutator come before the one that decides about it."
    )


MARK = "@"
"""Stands between the path of what is replaced and the candidate, in the path of a new module."""


class SharedModules(NewModules):
    """Makes modules beside each other that a space would put in one another's place.

    Equal ones are one: those of the same candidate with the same settings at the same path.

    Args:
        root: the model.
        seed: of their random numbers.
        anew: makes the model anew, for its own modules once more; None where nobody can.

    Attributes:
        condition: decisions by which a module that is made now is read.
    """

    def __init__(self, root: nn.Module, seed: int, anew: Callable[[], nn.Module] | None) -> None:
        super().__init__(root, seed, anew)
        self.condition: Condition = ()
        self._untied: set[str] = set()
        self._places: dict[tuple[Any, ...], str] = {}
        self._origin: dict[str, str] = {}

    def put(self, path: str, build: Build, settings: dict[str, Any], dtype: torch.dtype | None = None) -> str:
        """Make a module, with the random numbers that a space's has, and keep it at the path or beside it."""
        key = (path, id(build), repr(sorted(accepted(build, settings).items())), dtype)
        if key in self._places:
            return self._places[key]
        before = self._root.get_submodule(path) if self.has(path) else None
        if before is not None and path not in self._makers and path not in self._untied:
            self._check_untied(path)
            self._untied.add(path)
        new = self._beside(path)
        self._makers[new] = (build, settings, dtype)
        self._origin[new] = path
        self._make(new, path, before)
        self._places[key] = new
        return new

    def put_once_more(self, path: str, name: str) -> None:
        """Make the module at a path again below a name, with the random numbers that a space's copy has."""
        if path not in self._origin:
            super().put_once_more(path, name)
            return
        self.hold(path, name)
        new = f"{name}.{path}"
        self._makers[new] = self._makers[path]
        self._origin[new] = f"{name}.{self._origin[path]}"
        self._make(new, self._origin[new], None)
        self._set_modes(self._root.get_submodule(new), like=self._root.get_submodule(path))

    def name_in_space(self, path: str) -> str:
        """Return the path that a module has in a space that has decided for it."""
        return self._origin.get(path, path)

    def _beside(self, path: str) -> str:
        values = [str(value) for _, value in self.condition]
        names = [path, *(f"{path}{MARK}{','.join(values[-last:])}" for last in range(1, len(values) + 1))]
        return next(name for name in chain(names, (f"{names[-1]},{i}" for i in count(2))) if not self.has(name))


CONDITION = "condition"
"""What `node.meta` of a new node holds: the decisions with which it was made."""

Edges = dict[fx.Node, tuple[Any, Any]]
"""By node, what it is called with."""


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
        before = _edges(self.graph.nodes)
        changes: list[Edges] = []
        parked: Edges = {}
        for value in values:
            self.modules.condition = (*outside, (name, value))
            yield value
            # Nodes read what they have read before, and new ones nothing: the next candidate is not to change them.
            now = _edges(self.graph.nodes)
            changes.append({node: now[node] for node in before if now[node] != before[node]})
            self._read({node: before[node] for node in changes[-1]})
            new = {node: edges for node, edges in now.items() if node not in before and node not in parked}
            parked |= new
            for node in new:
                node.args, node.kwargs = (), {}
        self.modules.condition = outside
        self._read(parked)
        self._bring_together(name, values, before, changes)

    def select(self, name: str, candidates: Iterable[V], make: Callable[[V], fx.Node]) -> fx.Node:
        """Return a switch between the nodes that are made for the candidates."""
        values = tuple(candidates)
        return self._switch(name, values, tuple(make(value) for value in self.alternatives(name, values)))

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
        self._infer_new(new)
        self._let_read(readers, node, new)
        return new

    def replace(self, place: Place, build: Build, name: str) -> fx.Node:
        """Put a new module beside nodes, which is read in their stead.

        Raises:
            ConfigError: another mutator has several modules there.
        """
        if any(isinstance(node.target, Switch) and node_id(node) == place.id for node in place.nodes):
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

    def _is_used(self, name: str) -> bool:
        """Say whether a node or module has a name; nodes that no model has together may have one name."""
        conditions = [node.meta.get(CONDITION, ()) for node in self.graph.nodes if node_id(node) == name]
        if not conditions:
            return self.modules.has(name)
        now = dict(self.modules.condition)
        return not all(any(now.get(key, value) != value for key, value in condition) for condition in conditions)

    def _read(self, edges: Edges) -> None:
        for node, (args, kwargs) in edges.items():
            node.args, node.kwargs = args, kwargs
        self._reads_other(edges)

    def _bring_together(self, name: str, values: tuple[Value, ...], before: Edges, changes: list[Edges]) -> None:
        for node in sorted(set().union(*changes)):
            every = [edges.get(node, before[node]) for edges in changes]
            forms = [fx.node.map_arg(edges, lambda _: "node") for edges in every]
            if any(form != forms[0] for form in forms):
                raise ConfigError(
                    f"'{node_id(node)}' reads another number of nodes with other candidates of '{name}'; expected "
                    "that a shared space's decisions leave it. Join what it reads before, or search without shared."
                )
            read = list(zip(*map(nodes_in, every), strict=True))
            switches = iter([self._switch(name, values, sources) for sources in read])
            self._read({node: fx.node.map_arg(every[0], partial(_next, switches))})

    def _switch(self, name: str, values: tuple[Value, ...], sources: tuple[fx.Node, ...]) -> fx.Node:
        """Return what stands for one of some nodes; the node itself, where they are one."""
        if len(set(sources)) == 1:
            return sources[0]
        if (name, sources) not in self._switches:
            with self.graph.inserting_after(last_of(self.graph, sources)):
                node = self.graph.call_function(Switch(name, values), (list(sources),))
            ids = {node_id(source) for source in sources}
            own = ids.pop() if len(ids) == 1 else f"{name}:choice"
            blocks = Place.of(own, sources, None).blocks
            node.meta |= {ID: own, OWNER: "", BLOCKS: blocks, CONDITION: self.modules.condition}
            self._note("create", own, is_rewired=True)
            self._infer_new(node)
            self._switches[name, sources] = node
        return self._switches[name, sources]


def _next(nodes: Iterator[fx.Node], _: fx.Node) -> fx.Node:
    return next(nodes)


def _edges(nodes: Iterable[fx.Node]) -> Edges:
    return {node: (node.args, node.kwargs) for node in nodes}


def _refuse(name: str, candidates: tuple[Value, ...]) -> Value:
    raise ConfigError(
        f"decisions.{name}: found `choose`, which takes one of {len(candidates)} candidates; expected all of them in a "
        "shared space. Write `for value in graph.alternatives(name, candidates):` in the mutator, or search without it."
    )
