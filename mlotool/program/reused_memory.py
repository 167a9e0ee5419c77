"""Elementwise operations of a flat graph that write into a tensor which nothing reads any more."""

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.passes.shape_prop import TensorMetadata

_ATEN = torch.ops.aten


def reuse_memory(graph: Graph) -> None:
    """Let elementwise operations write into an argument of theirs whose last use they are.

    The values are the same to the bit. A new tensor costs its allocation and, where it is large, a way through memory
    that no cache has seen.

    Args:
        graph: of operations, each with the shape, strides and dtype of its result noted; it is changed.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> module = make_fx(lambda x: (x + 1).exp())(torch.zeros(3))
        >>> reuse_memory(module.graph)
        >>> module.recompile()
        >>> x = torch.zeros(3)
        >>> module(x), x
        (tensor([2.7183, 2.7183, 2.7183]), tensor([0., 0., 0.]))
    """
    owners: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for position, node in enumerate(graph.nodes):
        owners[node] = owners[_source(node)] if _is_view(node) else node
        for each in node.all_input_nodes:
            last[owners[each]] = position
    for position, node in enumerate(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if torch.Tag.pointwise not in target.tags or target._schema.is_mutable:
            continue
        for place in _places(node):
            owner = _root(owners, owners[place])
            is_free = owner.op == "call_function" and last[owner] == position and _fits(place, node)
            others = [each for each in node.all_input_nodes if each is not place]
            if is_free and all(_root(owners, owners[each]) is not owner for each in others):
                if _write_into(node, place):
                    # What reads the result reads this memory.
                    last[owner] = last.get(node, position)
                    owners[node] = owner
                break


def _root(owners: dict[Node, Node], node: Node) -> Node:
    """Return whose memory a node is in, after all that was changed before."""
    while owners[node] is not node:
        node = owners[node]
    return node


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _is_view(node: Node) -> bool:
    """Return whether a node's result lies in the memory of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is getitem:
        return _is_view(node.args[0])
    if node.target is _ATEN._unsafe_view.default:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and any(
        each.alias_info is not None for each in node.target._schema.returns
    )


def _places(node: Node) -> list[Node]:
    """Return the arguments into which an operation could write."""
    arguments = [each for each in node.args[:1] if isinstance(each, Node)]
    is_symmetric = node.target is _ATEN.mul.Tensor or (node.target is _ATEN.add.Tensor and not node.kwargs)
    if is_symmetric and len(node.args) == 2 and isinstance(node.args[1], Node):
        arguments.append(node.args[1])
    return arguments


def is_alike(first: Node, second: Node) -> bool:
    """Return whether the results of two operations have the same shape, strides and dtype, as far as they are noted."""
    kinds: list[Any] = [each.meta.get("tensor_meta") for each in (first, second)]
    if not all(isinstance(each, TensorMetadata) for each in kinds):
        return False
    known = [(each.shape, each.stride, each.dtype) for each in kinds]
    return known[0] == known[1]


def _fits(place: Node, node: Node) -> bool:
    """Return whether the result of an operation fits where its argument is."""
    if not is_alike(place, node) or _device(place) != _device(node):
        return False
    kind: Any = place.meta["tensor_meta"]
    return _is_dense(kind.shape, kind.stride)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether no two elements are in one place."""
    expected = 1
    for size, step in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda pair: pair[1]):
        if step < expected:
            return False
        expected = step * size
    return True


def _device(node: Node) -> Any:
    return getattr(node.meta.get("val"), "device", None)


def _write_into(node: Node, place: Node) -> bool:
    """Let an operation write into one of its arguments, if there is such a form of it."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.removeprefix("aten::")
    packet, in_place = getattr(_ATEN, name), getattr(_ATEN, f"{name}_", None)
    if target._overloadname in (() if in_place is None else in_place.overloads()):
        node.target = getattr(in_place, target._overloadname)
        if place is not node.args[0]:
            node.args = (place, node.args[0])
    elif "grad_input" in packet.overloads() and place is node.args[0]:
        node.target = packet.grad_input
        node.kwargs = {**node.kwargs, "grad_input": place}
    else:
        return False
    return True
