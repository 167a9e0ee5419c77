"""Equal operations of a flat graph, taken once where that costs little memory."""

from collections.abc import Hashable, Mapping
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten

_ATEN = torch.ops.aten
VIEWS = {
    getattr(_ATEN, name).default
    for name in ("view", "_unsafe_view", "expand", "t", "permute", "unsqueeze", "squeeze", "as_strided", "split")
} | {_ATEN.transpose.int, _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.split.Tensor, _ATEN.unbind.int}
"""Operations whose results are parts of their first argument's memory."""

SMALL = 1 / 256
"""Share of the peak up to which a value is always kept for its next use."""


def with_shared_values(graph: Graph) -> Graph:
    """Return a graph of the same function in which equal operations on equal values are one.

    A value that has several uses takes memory until the last one. Where that raises the graph's peak, as it does where
    products of one vector after the other share what does not depend on the vector, an elementwise operation whose
    result nothing waits for is left to be taken again: it takes little time beside the operations around it, and what
    it reads is kept by them. All others are taken once in any case, which may keep a large result of a matrix product
    or a convolution for its next use. Operations that draw random numbers or write stay as they are.

    Args:
        graph: of operations, each with the shape and dtype of its result noted.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> twice = make_fx(lambda x: x.exp() + x.exp())(torch.ones(3))
        >>> [node.name for node in with_shared_values(twice.graph).nodes]
        ['x_1', 'exp', 'add', 'output']
    """
    most = peak_bytes(graph)
    shared = _shared(graph)
    if peak_bytes(shared) <= most:
        return shared
    return min(shared, _shared(graph, kept_up_to=SMALL * most), key=peak_bytes)


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes that results of operations take at one time, each until its last use."""
    last = _last_uses(graph)
    ends: dict[int, int] = {}
    live = peak = 0
    for position, node in enumerate(graph.nodes):
        if node.op == "call_function" and _owner(node) is node:
            size = _num_bytes(node)
            live += size
            end = last.get(node, position)
            ends[end] = ends.get(end, 0) + size
        peak = max(peak, live)
        live -= ends.pop(position, 0)
    return peak


def _shared(graph: Graph, kept_up_to: float | None = None) -> Graph:
    """Return the graph with equal operations as one; if a size is given, larger elementwise results are not kept."""
    last, found = _last_uses(graph), Graph()
    numbers: dict[Node, int] = {}
    number_of: dict[Hashable, int] = {}
    # By number: the node in the new graph, those that it reads, and until when nodes of the old graph read it.
    current: list[Node] = []
    read: list[list[Node]] = []
    wanted_until: list[int] = []
    for position, node in enumerate(graph.nodes):
        inputs = [current[numbers[each]] for each in node.all_input_nodes]
        number = number_of.setdefault(_key(node, numbers), len(current))
        until = last.get(_owner(node), position)
        numbers[node] = number
        is_new = number == len(current)
        if is_new:
            current.append(node)
            read.append(inputs)
            wanted_until.append(until)
        elif kept_up_to is not None and (
            # Of what has been taken again, or dead and cheap.
            (_is_view(node) and read[number] != inputs)
            or (wanted_until[number] < position and _is_elementwise(node) and _num_bytes(node) > kept_up_to)
        ):
            read[number], wanted_until[number] = inputs, until
        else:
            wanted_until[number] = max(wanted_until[number], until)
            continue
        current[number] = found.node_copy(node, lambda each: current[numbers[each]])
    found.eliminate_dead_code()
    return found


def _key(node: Node, numbers: Mapping[Node, int]) -> Hashable:
    """Return what is equal for equal operations on equal values."""
    if node.op not in ("call_function", "get_attr") or _is_impure(node):
        return node
    leaves, structure = tree_flatten((node.args, node.kwargs))
    return node.target, structure, tuple(_value(leaf, numbers) for leaf in leaves)


def _is_impure(node: Node) -> bool:
    """Return whether an operation draws random numbers or writes, so that taking it twice is not taking it once."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    )


def _value(leaf: Any, numbers: Mapping[Node, int]) -> Hashable:
    # As text, a zero differs from a negative one and NaN is itself; the type tells 1 from True.
    return (Node, numbers[leaf]) if isinstance(leaf, Node) else (type(leaf), repr(leaf))


def _last_uses(graph: Graph) -> dict[Node, int]:
    """Return at which position the memory of each node is read last, through views too."""
    return {_owner(each): at for at, node in enumerate(graph.nodes) for each in node.all_input_nodes}


def _owner(node: Node) -> Node:
    """Return the node whose memory a node is in."""
    while _is_view(node):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _is_view(node: Node) -> bool:
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.target in VIEWS
    return node.op == "call_function" and node.target in VIEWS


def _is_elementwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _num_bytes(node: Node) -> int:
    """Return the bytes of one tensor; a tuple has none of its own."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return 0 if shape is None or dtype is None else int(torch.Size(shape).numel()) * int(dtype.itemsize)
