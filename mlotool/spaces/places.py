"""The places of a graph that a mutator changes: their description by path, type, predicate or chain, and the search."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from torch import Size, fx, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.messages import did_you_mean, shown
from mlotool.core.settings import setting_fault, target
from mlotool.spaces.shapes import shape_of
from mlotool.spaces.tracing import BLOCKS, CALLS, OWNER, forward_of, kind_of, matches, node_id

Predicate = Callable[["Place"], bool]

_LISTED = "`mlotool show RECIPE --nodes PROBLEM` lists them."


@dataclass(frozen=True)
class Place:
    """A place in a graph: a node, or several nodes that a mutator treats as one, with one input and one output.

    Args:
        id: of the node, of its last one, or the path of the module that they are.
        nodes: in their order.
        module: that the node calls, or whose forward the nodes are; None for functions and chains.
        input_shape: of what goes in, without the batch; None where that is no tensor.
        output_shape: of what comes out, without the batch.
    """

    id: str
    nodes: tuple[fx.Node, ...] = field(repr=False)
    module: nn.Module | None
    input_shape: Size | None
    output_shape: Size | None

    @classmethod
    def of(cls, name: str, nodes: Sequence[fx.Node], module: nn.Module | None) -> "Place":
        """Return some nodes as a place, with the shapes that are known of them."""
        place = cls(name, tuple(nodes), module, None, shape_of(nodes[-1]))
        return replace(place, input_shape=shape_of(place.inputs[0]) if place.inputs else None)

    @property
    def kind(self) -> str:
        """The name of the module's class, or of the function."""
        return kind_of(self.nodes[-1], self.module)

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes outside of it that it reads, each once."""
        inside = set(self.nodes)
        read = (source for node in self.nodes for source in node.all_input_nodes if source not in inside)
        return list(dict.fromkeys(source for source in read if source.op != "get_attr"))

    @property
    def input(self) -> fx.Node:
        """The one node outside of it that it reads.

        Raises:
            InfeasibleModelError: there is none, or several.
        """
        if len(self.inputs) == 1:
            return self.inputs[0]
        raise InfeasibleModelError(
            f"'{self.id}' reads {len(self.inputs)} nodes; expected a place with one input. Write another path."
        )

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of the modules of whose forward it is a part: so is what is put beside or behind it."""
        blocks = set.intersection(*(_prefixes((forward_of(node), *node.meta.get(BLOCKS, ()))) for node in self.nodes))
        is_block = self.module is not None and self.id != node_id(self.nodes[-1])
        return tuple(sorted(block for block in blocks if not (is_block and f"{block}.".startswith(f"{self.id}."))))


@dataclass(frozen=True)
class Target:
    """A description of places in a graph; a place has to fit everything that is given.

    Args:
        path: pattern of the node's id; `*` is any text within one name, `**` any number of names. The path of a module
            that is not a node itself stands for all nodes of its forward, as one place.
        type: name of the module's class (`Conv2d`), or of the function (`relu`).
        where: a predicate: a function of a `Place` that returns a bool.
        chain: descriptions of consecutive nodes, each of which is the only one that reads the node before.

    Example:
        >>> as_target({"path": "stages.*", "type": "Conv2d"})
        Target(path='stages.*', type='Conv2d', where=None, chain=())
    """

    path: str | None = None
    type: str | None = None
    where: Predicate | None = None
    chain: tuple["Target", ...] = ()

    def fits(self, place: Place) -> bool:
        """Say whether a place is as described, its chain aside."""
        return (
            (self.path is None or matches(place.id, self.path))
            and (self.type is None or self.type == place.kind)
            and (self.where is None or _is_meant(self.where, place))
        )

    def __str__(self) -> str:
        """Return it in words."""
        if self.chain:
            return f"a chain of {', then '.join(map(str, self.chain))}"
        where = None if self.where is None else type(self.where).__name__
        parts = {"path": self.path, "type": self.type, "where": where}
        return ", ".join(f"{key} {shown(value)}" for key, value in parts.items() if value is not None)


def _is_meant(where: Predicate, place: Place) -> bool:
    answer = where(place)
    require(isinstance(answer, bool), "at.where", answer, "True or False from a predicate", "Return bool(..).")
    return answer


class _Described(TypedDict, total=False):
    """A `Target` in a recipe."""

    path: str | None
    type: str | None
    where: Any
    chain: Sequence[Any] | None


def as_target(described: "str | Mapping[str, Any] | Target") -> Target:
    """Return a target as it is written in a recipe: a path, or a mapping with some of the arguments of `Target`.

    Raises:
        ConfigError: it has other keys, or says nothing.
    """
    if isinstance(described, Target):
        return described
    if isinstance(described, str):
        return Target(path=described)
    fault = setting_fault("at", described, str | _Described)
    if fault is not None or not described:
        raise ConfigError(fault or "at: found {}; expected some of path, type, where, chain. Write at: {type: Conv2d}.")
    where, links = described.get("where"), described.get("chain")
    require(where is None or callable(where), "at.where", where, "a predicate, called with a place")
    chain = tuple(as_target(link) for link in links or ())
    is_chain = len(chain) > 1 and len(described) == 1 and not any(link.chain for link in chain)
    expected = "at least two targets of one node each, with no chain inside a chain and no other key beside it"
    require(links is None or is_chain, "at.chain", links, expected, "Write chain: [{type: Conv2d}, {type: ReLU}].")
    return Target(**{**described, "chain": chain})


@target("predicate")
class KeepsShape:
    """A predicate of places (`where`): the output has the shape of the input.

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 4))
        >>> norm = Insert("norm", {"where": KeepsShape()}, {"none": None, "layer": torch.nn.LayerNorm})
        >>> list(Space(base, [norm], inputs=[2]).decisions)
        ['norm_0']
    """

    def __call__(self, place: Place) -> bool:
        """Return whether the place keeps the shape."""
        return place.input_shape is not None and place.input_shape == place.output_shape


@target("predicate")
class HasSetting:
    """A predicate of places (`where`): a setting of the module has a given value, such as a stride of 1.

    Args:
        name: of the module's attribute.
        value: that it has; a number also matches a tuple of equal numbers: 2 matches (2, 2).

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(2, 2, 3, stride=2))
        >>> kernel = Operator("kernel", {"where": HasSetting("stride", 2)}, {"keep": None})
        >>> list(Space(base, [kernel], inputs=[1, 9, 9]).decisions)
        ['kernel_0']
    """

    def __init__(self, name: str, value: Any) -> None:
        # YAML has no tuples.
        self._name, self._value = name, tuple(value) if isinstance(value, list) else value

    def __call__(self, place: Place) -> bool:
        """Return whether the place's module has the value."""
        value = getattr(place.module, self._name, None)
        return bool(value == self._value or (isinstance(value, tuple) and all(part == self._value for part in value)))


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
        inside: dict[str, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                yield self._of_node(node)
            if node.op not in ("placeholder", "output"):
                owner = str(node.target) if node.op == "call_module" else str(node.meta[OWNER])
                for path in _prefixes((owner, *node.meta.get(BLOCKS, ()))):
                    inside.setdefault(path, []).append(node)
        called = {node_id(node) for node in self._graph.nodes if node.op == "call_module"}
        for path, module in self._root.named_modules():
            if path not in called and _is_whole_call(path, inside.get(path, ())):
                yield Place.of(path, inside[path], module)

    def find(self, target: Target, *, of_some: bool = False) -> list[Place]:
        """Return the places that a target describes, in the order of their last nodes.

        Args:
            target: describes them.
            of_some: whether one may be a place that only some models have, where a graph holds several.

        Raises:
            ConfigError: there is none, or two of them share a node.
        """
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        places = sorted(self._fitting(target, of_some), key=lambda place: order[place.nodes[-1]])
        if not places:
            every = list(self.every())
            hint = did_you_mean(target.path, [place.id for place in every]) if target.path else ""
            if target.type is not None:
                hint = did_you_mean(target.type, sorted({place.kind for place in every}))
            raise ConfigError(f"at: found no place for {str(target)[:300]} in the graph.{hint} {_LISTED}")
        holders: dict[fx.Node, str] = {}
        for place in places:
            for node in place.nodes:
                both = place.id, holders.setdefault(node, place.id)
                advice = "Write a path that is for one of the two."
                require(len(set(both)) == 1, "at", both, "places that share no node", advice)
        return places

    def _fitting(self, target: Target, of_some: bool) -> Iterator[Place]:
        if not target.chain:
            yield from (place for place in self.every() if target.fits(place))
            return
        for node in self._graph.nodes:
            nodes: list[fx.Node] = []
            for link in target.chain:
                following = [node] if not nodes else list(nodes[-1].users)
                is_step = len(following) == 1 and following[0].op not in ("placeholder", "output", "get_attr")
                if not is_step or not link.fits(self._of_node(following[0])):
                    break
                nodes.append(following[0])
            if len(nodes) == len(target.chain):
                yield Place.of(node_id(nodes[-1]), nodes, None)

    def _of_node(self, node: fx.Node) -> Place:
        module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None
        return Place.of(node_id(node), [node], module)


def node_of(graph: fx.Graph, name: str) -> fx.Node:
    """Return a node by its id.

    Raises:
        ConfigError: there is none.
    """
    nodes: dict[str, fx.Node] = {node_id(node): node for node in graph.nodes}
    if name in nodes:
        return nodes[name]
    raise ConfigError(f"found no node {shown(name)} in the graph.{did_you_mean(name, list(nodes))} {_LISTED}")


def _is_whole_call(path: str, nodes: Sequence[fx.Node]) -> bool:
    """Say whether a module is called once, its forward is these nodes, and only the last of them is read outside."""
    calls = {call for node in nodes for call in node.meta.get(CALLS, ()) if call.partition("@")[0] == path}
    inside = set(nodes)
    read = {node for node in nodes if any(user not in inside for user in node.users)}
    return bool(nodes) and len(calls) <= 1 and read <= {nodes[-1]}


def _prefixes(paths: Iterable[str]) -> set[str]:
    """Return paths and those of all modules around them, but for the model's own."""
    names = [path.split(".") for path in paths if path]
    return {".".join(name[:count]) for name in names for count in range(1, len(name) + 1)}
