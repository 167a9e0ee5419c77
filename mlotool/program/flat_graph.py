"""Fewer and cheaper calls for a traced graph, whose operations are pure, and the writes into its arguments."""

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mlotool.problem.optimizers.registry import RULES
from mlotool.program.reused_memory import is_alike, reuse_memory
from mlotool.program.shared_values import VIEWS, with_shared_values

_ATEN = torch.ops.aten
_IDENTITIES = {_ATEN.alias.default, _ATEN.detach.default}
_RESHAPES = {_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.expand.default}
_METHODS = {"view": Tensor.view, "expand": Tensor.expand, "t": Tensor.t, "clone": Tensor.clone}
_VIEWS = {*VIEWS, getitem}
_KERNELS: dict[Any, tuple[Any, Sequence[int]]] = {
    kernel.pure: (kernel.traced_in_place, [0, *range(2, 2 + len(rule.vectors))])
    for rule in RULES.values()
    for kernel in rule.kernels
}
"""By kernel of an optimizer, its form in place, and which of its outputs are written into the arguments of the same
number: lists of tensors. The gradient stays."""


def simplified(module: GraphModule) -> GraphModule:
    """Return a module of the same function with equal operations shared and identities left out.

    Args:
        module: of aten operations without autograd, none of them in place.
    """
    graph = module.graph
    _remove_identities(graph)
    graph.eliminate_dead_code()
    shared = with_shared_values(graph)
    _remove_identities(shared)
    shared.eliminate_dead_code()
    return GraphModule(module, shared)


def add_writes(module: GraphModule, num_moved: int, *, in_place: bool) -> tuple[int, ...]:
    """Turn outputs into writes.

    Args:
        module: its first outputs are what the first arguments are to become, one each.
        num_moved: how many.
        in_place: write them; else those that change are outputs, before the last one.

    Returns:
        The positions of the arguments that change, where they are outputs; else none.
    """
    graph = module.graph
    places = [node for node in graph.nodes if node.op == "placeholder"][:num_moved]
    [output] = [node for node in graph.nodes if node.op == "output"]
    if in_place:
        _step_in_place(graph, places, output)
    outputs = list(output.args[0])
    values, others = outputs[:num_moved], outputs[num_moved:]
    changed = [position for position, value in enumerate(values) if value is not places[position]]
    if in_place:
        with graph.inserting_before(output):
            for position in changed:
                graph.call_function(_ATEN.copy_.default, (places[position], values[position]))
        output.args = (tuple(others),)
    else:
        output.args = ((*others[:-1], *[values[position] for position in changed], others[-1]),)
    module.recompile()
    return () if in_place else tuple(changed)


def with_direct_calls(module: GraphModule) -> GraphModule:
    """Return the same module, its operations called by the shortest way; nothing of torch's can read it any more."""
    graph = module.graph
    _join_copies(graph)
    reuse_memory(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _direct(node.target)
    found = GraphModule(module, graph)
    found.recompile()
    return found


def _step_in_place(graph: Graph, places: Sequence[Node], output: Node) -> None:
    """Let the kernels of optimizers write where they can."""
    numbers = {place: number for number, place in enumerate(places)}
    values = list(output.args[0])  # type: ignore[arg-type]
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is _ATEN._foreach_add.Scalar:
            pairs = [(node.args[0], {int(user.args[1]): user for user in node.users})]
            target = _ATEN._foreach_add_.Scalar
        elif node.target in _KERNELS:
            target, written = _KERNELS[node.target]
            lists = {int(user.args[1]): user for user in node.users}
            pairs = [
                (node.args[number], {int(user.args[1]): user for user in lists[number].users})
                for number in written
                if number in lists
            ]
        else:
            continue
        found = [(place, users.get(index)) for given, users in pairs for index, place in enumerate(given)]
        if all(
            place in numbers and values[numbers[place]] is value and not _is_read_after(place, node, order)
            for place, value in found
        ):
            node.target = target
            for place, value in found:
                assert value is not None
                value.replace_all_uses_with(place)
            values = list(output.args[0])  # type: ignore[arg-type]
    _erase_unused(graph)


def _is_read_after(place: Node, node: Node, order: Mapping[Node, int]) -> bool:
    """Return whether something reads a place, or a view of it, after a node."""
    for user in place.users:
        if user.op != "output" and order[user] > order[node]:
            return True
        if user.target in _VIEWS and _is_read_after(user, node, order):
            return True
    return False


def _erase_unused(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.target is getitem and not node.users:
            graph.erase_node(node)


def _join_copies(graph: Graph) -> None:
    """Make one call of all copies at the end."""
    copies = [node for node in graph.nodes if node.target is _ATEN.copy_.default and not node.users]
    if len(copies) > 1:
        with graph.inserting_before(copies[-1]):
            places, values = zip(*[node.args for node in copies], strict=True)
            graph.call_function(_ATEN._foreach_copy_.default, (list(places), list(values)))
        for node in copies:
            graph.erase_node(node)


def _remove_identities(graph: Graph) -> None:
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node):
            continue
        if _changes_nothing(node, source):
            node.replace_all_uses_with(source)
        elif _undoes(node, source):
            [twice, *_] = source.args
            assert isinstance(twice, Node)
            node.replace_all_uses_with(twice)
        elif _drops_sums(node, source):
            # As a bias's gradient has it.
            source.args = (*source.args[:2], False)
            source.meta = dict(node.meta)
            node.replace_all_uses_with(source)


def _changes_nothing(node: Node, source: Node) -> bool:
    if node.target in _IDENTITIES:
        return True
    is_by_one = node.target is _ATEN.mul.Tensor and node.args[1] == 1
    return (is_by_one or node.target in _RESHAPES) and is_alike(node, source)


def _undoes(node: Node, source: Node) -> bool:
    """Return whether two transpositions follow each other that lead back."""
    if node.target is source.target is _ATEN.t.default:
        return True
    is_pair = node.target is source.target is _ATEN.transpose.int
    return is_pair and {*node.args[1:]} == {*source.args[1:]}


def _direct(target: Any) -> Any:
    """Return the Python binding of an aten operation: it parses its arguments in half the time."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    name = target._schema.name.removeprefix("aten::")
    if name in _METHODS:
        return _METHODS[name]
    if name.endswith("_") and not name.startswith("_") and hasattr(Tensor, name):
        return getattr(Tensor, name)
    return getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C._nn, name, None) or target


def _drops_sums(node: Node, source: Node) -> bool:
    """Return whether a view leaves out the axes that a sum over them has kept for it alone."""
    if node.target is not _ATEN.view.default or source.target is not _ATEN.sum.dim_IntList:
        return False
    if len(source.users) > 1 or source.kwargs or source.args[2:] != (True,):
        return False
    summed, axes = source.args[:2]
    assert isinstance(summed, Node) and isinstance(axes, list)
    shape = summed.meta["val"].shape
    left_out = {int(axis) % len(shape) for axis in axes}
    return [*node.meta["val"].shape] == [size for axis, size in enumerate(shape) if axis not in left_out]
