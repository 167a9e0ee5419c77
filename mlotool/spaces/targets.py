"""Which places of a graph a mutator changes: by path, by type, by a predicate, as a chain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Size, fx, nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of as kind_of_result
from mlotool.core.messages import shown
from mlotool.core.user_code import Call, WrongResultError, explained, note
from mlotool.spaces.tracing import ID, matches

Predicate = Callable[["Place"], bool]


@dataclass(frozen=True)
class Place:
    """A node, or several that a mutator takes as one, with one input and one output.

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

    @property
    def kind(self) -> str:
        """The name of the module's class, or of the function."""
        if self.module is not None:
            return type(self.module).__name__
        return kind_of(self.nodes[-1], None)

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes outside of it that it reads, each once."""
        inside = set(self.nodes)
        read = (each for node in self.nodes for each in node.all_input_nodes if each not in inside)
        return list(dict.fromkeys(each for each in read if each.op != "get_attr"))


@dataclass(frozen=True)
class Target:
    """A description of places: they have all that is given.

    Args:
        path: of the id; `*` is any text within one name, `**` any number of names. The path of a module that is no node
            itself stands for all nodes of its forward, taken as one.
        type: name of the module's class (`Conv2d`), or of the function (`relu`).
        where: a predicate of places: takes a `Place`, returns a bool.
        chain: targets of nodes one after the other, each of which alone reads the one before.

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


def _is_meant(where: Predicate, place: Place) -> bool:
    """Ask a predicate.

    Raises:
        ConfigError: it fails, or returns something else than a bool; with where it stands, and the line.
    """
    try:
        found = where(place)
        if not isinstance(found, bool):
            raise WrongResultError(kind_of_result(found), "True or False", "Return bool(..).")
    except KeyboardInterrupt:
        raise
    # SystemExit, which code of the user's may raise, is no Exception.
    except BaseException as error:
        advice = "Correct it: def __call__(self, place): return .."
        note(error, lambda: Call("at.where", where, {"place": f"{place.id} ({place.kind})"}, advice=advice))
        raise ConfigError(explained(error) or str(error)) from error
    return found


def as_target(described: "str | Mapping[str, Any] | Target") -> Target:
    """Return a target as it is written in a recipe: a path, or a mapping with some of the arguments of `Target`.

    Raises:
        ConfigError: it has other keys, or says nothing.
    """
    if isinstance(described, Target):
        return described
    if isinstance(described, str):
        return Target(path=described)
    keys = ("path", "type", "where", "chain")
    if not isinstance(described, Mapping) or not described or not set(described) <= set(keys):
        raise ConfigError(
            f"at: found {shown(described)}; expected a path such as 'stages.*', or some of {', '.join(keys)}. "
            "Write at: {type: Conv2d}."
        )
    path, kind, where, chain = (described.get(key) for key in keys)
    for key, value in (("path", path), ("type", kind)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"at.{key}: found {shown(value)}; expected a text. Write at: {{{key}: ..}}.")
    if where is not None and not callable(where):
        raise ConfigError(
            f"at.where: found {shown(where)}; expected a predicate, whose object says of a place whether it is meant. "
            "Write at: {where: {_target_: ..}}."
        )
    if chain is not None and (not isinstance(chain, Sequence) or isinstance(chain, str) or len(chain) < 2):
        raise ConfigError(
            f"at.chain: found {shown(chain)}; expected at least two targets, one after the other. Write at: {{chain: "
            "[{type: Conv2d}, {type: BatchNorm2d}]}."
        )
    if chain is not None and any(isinstance(each, Mapping) and "chain" in each for each in chain):
        raise ConfigError(
            "at.chain: found a chain inside a chain; expected targets of one node each. Write their targets in one "
            "chain."
        )
    if chain is not None and (path, kind, where) != (None, None, None):
        raise ConfigError(
            "at: found chain beside other keys; expected it alone. Write them in the targets of the chain."
        )
    return Target(path, kind, where, tuple(as_target(each) for each in chain or ()))


def kind_of(node: fx.Node, module: nn.Module | None) -> str:
    """Return the name of a node's class, function or operation."""
    if module is not None:
        return type(module).__name__
    if node.op in ("placeholder", "output", "get_attr"):
        return node.op
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def node_id(node: fx.Node) -> str:
    """Return the id of a node."""
    found = node.meta[ID]
    assert isinstance(found, str)
    return found
