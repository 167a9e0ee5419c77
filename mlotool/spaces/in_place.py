"""Operations that change a tensor which other nodes may read: a graph does not say in which order they do."""

from collections.abc import Iterable, Iterator
from itertools import takewhile

from torch import fx, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces.node_calls import Effect, operands
from mlotool.spaces.shapes import EFFECT, GIVEN
from mlotool.spaces.targets import node_id
from mlotool.spaces.tracing import OWNER, WHOLE

Conflict = tuple[fx.Node, fx.Node, fx.Node]
"""A node that changes a tensor, another whose result has the same memory, and who reads that afterwards."""


def without_in_place(graph: fx.Graph, root: nn.Module) -> None:
    """Let layers and functions with `inplace=True` return new tensors, of the same values.

    Other operations that change what they read stay (`x.relu_()`). What reads their operand later, and so
    finds it changed, then reads their result.

    Args:
        graph: of the model, whose shapes are known.
        root: the model; its layers' `inplace` becomes false.

    Raises:
        ConfigError: an operation changes what is read afterwards under another name, as a view of it.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    shared = _sharing(graph)
    for node in graph.nodes:
        source = changed(node, root)
        if source is not None:
            for reader in list(source.users):
                if order[reader] > order[node]:
                    reader.replace_input_with(source, node)
        every = {*changed_operands(node), *([] if source is None else [source])}
        for _, other, reader in _conflicts(node, every, shared, order):
            raise _refusal(node, other, reader)
        if node.op == "call_module" and source is not None:
            layer = root.get_submodule(str(node.target))
            if hasattr(layer, "inplace"):
                layer.inplace = False  # type: ignore[assignment]
                del node.meta[GIVEN]
        elif node.kwargs.get("inplace") is True:
            node.kwargs = {**node.kwargs, "inplace": False}


def check_order(graph: fx.Graph) -> None:
    """Refuse a graph in which what a node changes in place is read afterwards under another name.

    Raises:
        InfeasibleModelError: with the nodes.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    shared = _sharing(graph)
    for node in graph.nodes:
        for _, other, reader in _conflicts(node, changed_operands(node), shared, order):
            raise InfeasibleModelError(
                f"node '{node_id(node)}' changes in place what '{node_id(other)}' returns, which '{node_id(reader)}' "
                "reads afterwards; expected modules that return new tensors. Correct the candidate, or write another "
                "path."
            )


def is_changed(graph: fx.Graph, node: fx.Node) -> bool:
    """Say whether an operation that comes later changes what a node returns."""
    changing = [each for each in graph.nodes if _effect(each).changed]
    if not changing:
        return False
    shared = _sharing(graph)[node]
    order = {each: number for number, each in enumerate(graph.nodes)}
    return any(order[each] > order[node] and not shared.isdisjoint(changed_operands(each)) for each in changing)


def changed(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """Return the node whose result an operation changes, and returns; None where it changes none."""
    if node.op == "call_module":
        is_in_place = getattr(root.get_submodule(str(node.target)), "inplace", None) is True
    elif node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_in_place = node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))
    else:
        is_in_place = False
    first = node.args[0] if node.args else None
    if isinstance(first, fx.Node) and (is_in_place or {0} <= _effect(node).viewed & _effect(node).changed):
        return first
    return None


def changed_operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose results the call of a node changes, as far as evaluation shows it."""
    given = operands(node)
    return [given[position] for position in _effect(node).changed]


def _effect(node: fx.Node) -> Effect:
    found = node.meta.get(EFFECT, Effect())
    assert isinstance(found, Effect)
    return found


def _sharing(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return, for each node, those whose results have the memory of its own; itself is one of them."""
    shared: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        given = operands(node)
        groups = [shared[given[position]] for position in _effect(node).viewed]
        together = {node}.union(*groups)
        for each in together:
            shared[each] = together
    return shared


def _conflicts(
    node: fx.Node, sources: Iterable[fx.Node], shared: dict[fx.Node, set[fx.Node]], order: dict[fx.Node, int]
) -> Iterator[Conflict]:
    for source in sources:
        for other in sorted(shared[source], key=order.__getitem__):
            if order[other] < order[node]:
                yield from ((node, other, reader) for reader in other.users if order[reader] > order[node])


def _refusal(node: fx.Node, other: fx.Node, reader: fx.Node) -> ConfigError:
    return ConfigError(
        f"leaves: node '{node_id(node)}' changes in place what '{node_id(other)}' returns, which '{node_id(reader)}' "
        "reads afterwards, so that mutators at one would miss the other; expected the result of the change where it "
        f"is read, as x = x.relu(). Write that, or leaves: ['{_holder(node, other, reader)}'], which makes one node of "
        "it."
    )


def _holder(*nodes: fx.Node) -> str:
    """Return the path of the module in whose forward some nodes are."""
    paths = [str(node.meta.get(OWNER, "")).split(".") for node in nodes]
    called = [path[:-1] if node.op == "call_module" else path for node, path in zip(nodes, paths, strict=True)]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*called, strict=False))
    return ".".join(names[0] for names in shared) or WHOLE
