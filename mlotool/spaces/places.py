"""The places of a graph: its nodes, and the modules whose forward they are."""

from collections.abc import Iterable, Iterator, Sequence

from torch import fx, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.messages import did_you_mean, shown
from mlotool.spaces.shapes import shape_of
from mlotool.spaces.targets import Place, Target, node_id
from mlotool.spaces.tracing import BLOCKS, CALLS, OWNER

MAX_TARGETS = 4
"""Of a chain, those that a message tells."""


class Places:
    """Finds what targets describe.

    Args:
        root: the model.
        graph: of its forward.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self._root, self._graph = root, graph

    def every(self) -> Iterator[Place]:
        """Yield each node as a place, then each module whose forward is several nodes."""
        for node in self._graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                yield self._of_node(node)
        seen = {node_id(node) for node in self._graph.nodes if node.op == "call_module"}
        inside = self._by_module()
        for path, module in self._root.named_modules():
            if path and path not in seen and (nodes := _whole_call(path, inside.get(path, ()))):
                yield self._place(path, nodes, module)

    def find(self, target: Target, *, of_some: bool = False) -> list[Place]:
        """Return the places that a target describes, in the order of their last nodes.

        Args:
            target: describes them.
            of_some: whether one may be a place that only some models have, where a graph holds several.

        Raises:
            ConfigError: there is none, or two of them share a node.
        """
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        places = sorted(self._fitting(target, of_some), key=lambda each: order[each.nodes[-1]])
        if not places:
            raise ConfigError(self._of_nothing(target))
        taken: dict[fx.Node, str] = {}
        for place in places:
            for node in place.nodes:
                if node in taken:
                    raise ConfigError(
                        f"at: found '{place.id}' and '{taken[node]}', which share nodes; expected places beside each "
                        "other. Write a path that is for one of the two."
                    )
                taken[node] = place.id
        return places

    def _fitting(self, target: Target, of_some: bool) -> Iterator[Place]:
        return self._chains(target.chain) if target.chain else (each for each in self.every() if target.fits(each))

    def _of_nothing(self, target: Target) -> str:
        ids = [place.id for place in self.every()]
        hint = did_you_mean(target.path, ids) if target.path else ""
        if target.type is not None:
            hint = did_you_mean(target.type, sorted({place.kind for place in self.every()}))
        return (
            f"at: found no place for {_written(target)}; expected one of the graph's nodes, or a module of them.{hint} "
            "`mlotool show RECIPE --nodes PROBLEM` lists them."
        )

    def _chains(self, chain: tuple[Target, ...]) -> Iterator[Place]:
        for node in self._graph.nodes:
            nodes: list[fx.Node] = []
            for target in chain:
                node = node if not nodes else _only_reader(nodes[-1])
                if (
                    node is None
                    or node.op in ("placeholder", "output", "get_attr")
                    or not target.fits(self._of_node(node))
                ):
                    break
                nodes.append(node)
            if len(nodes) == len(chain):
                yield self._place(node_id(nodes[-1]), tuple(nodes), None)

    def _by_module(self) -> dict[str, list[fx.Node]]:
        """Return the nodes of the forward of each module, by its path."""
        found: dict[str, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.op not in ("placeholder", "output"):
                owner = str(node.target) if node.op == "call_module" else str(node.meta[OWNER])
                for path in _prefixes((owner, *node.meta.get(BLOCKS, ()))):
                    found.setdefault(path, []).append(node)
        return found

    def _of_node(self, node: fx.Node) -> Place:
        module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None
        return self._place(node_id(node), (node,), module)

    def _place(self, name: str, nodes: tuple[fx.Node, ...], module: nn.Module | None) -> Place:
        place = Place(name, nodes, module, None, shape_of(nodes[-1]))
        sources = place.inputs
        return Place(name, nodes, module, shape_of(sources[0]) if sources else None, place.output_shape)


def input_of(place: Place) -> fx.Node:
    """Return the one node outside of a place that it reads.

    Raises:
        InfeasibleModelError: there is none, or several.
    """
    found = place.inputs
    if len(found) == 1:
        return found[0]
    raise InfeasibleModelError(
        f"'{place.id}' reads {len(found)} nodes from outside; expected a place with one input. "
        "Write another path, or a chain."
    )


def node_of(graph: fx.Graph, name: str) -> fx.Node:
    """Return a node by its id.

    Raises:
        ConfigError: there is none.
    """
    nodes: dict[str, fx.Node] = {node_id(each): each for each in graph.nodes}
    if name in nodes:
        return nodes[name]
    raise ConfigError(
        f"found no node {shown(name)}; expected an id of the graph.{did_you_mean(name, list(nodes))} "
        "`mlotool show RECIPE --nodes PROBLEM` lists them."
    )


def _whole_call(path: str, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the nodes of a module's forward, if it is called once and only the last of them is read outside."""
    calls = {call for node in nodes for call in node.meta.get(CALLS, ()) if call.partition("@")[0] == path}
    if len(calls) > 1:
        return ()
    inside = set(nodes)
    read = {node for node in nodes if any(user not in inside for user in node.users)}
    return tuple(nodes) if nodes and read <= {nodes[-1]} else ()


def _is_within(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def blocks_of(place: Place) -> tuple[str, ...]:
    """Return the paths of the modules of whose forward a place is a part: so is what is put beside or behind it."""
    blocks = set.intersection(*(_blocks_around(node) for node in place.nodes))
    is_block = place.module is not None and place.id != node_id(place.nodes[-1])
    return tuple(sorted(each for each in blocks if not (is_block and _is_within(each, place.id))))


def _blocks_around(node: fx.Node) -> set[str]:
    owner = str(node.meta[OWNER])
    nearest = (owner.rpartition(".")[0] if node.op == "call_module" else owner, *node.meta.get(BLOCKS, ()))
    return _prefixes(nearest)


def _prefixes(paths: Iterable[str]) -> set[str]:
    """Return paths and those of all modules around them, but for the model's own."""
    names = [each.split(".") for each in paths if each]
    return {".".join(each[:count]) for each in names for count in range(1, len(each) + 1)}


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _written(target: Target) -> str:
    if target.chain:
        more = f", then {len(target.chain) - MAX_TARGETS} more" if len(target.chain) > MAX_TARGETS else ""
        return f"a chain of {', then '.join(_written(each) for each in target.chain[:MAX_TARGETS])}{more}"
    where = None if target.where is None else type(target.where).__name__
    given = {"path": target.path, "type": target.type, "where": where}
    return ", ".join(f"{key} {shown(value)}" for key, value in given.items() if value is not None)
