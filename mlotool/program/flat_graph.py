"""Fewer and cheaper calls for a traced graph, whose operations are pure, and the writes into its arguments."""

from collections.abc import Hashable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._pytree import tree_flatten

_ATEN = torch.ops.aten
VIEWS = {
    getattr(_ATEN, name).default
    for name in ("view", "_unsafe_view", "expand", "t", "permute", "unsqueeze", "squeeze", "as_strided", "split")
} | {
    _ATEN.transpose.int,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.split.Tensor,
    _ATEN.unbind.int,
}
"""Operations whose results are parts of their first argument's memory."""
_IDENTITIES = {_ATEN.alias.default, _ATEN.detach.default}
_RESHAPES = {_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.expand.default}
_METHODS = {"view": Tensor.view, "expand": Tensor.expand, "t": Tensor.t, "clone": Tensor.clone}
_VIEWS = {*VIEWS, getitem}
_ADAM = {0: 0, 2: 2, 3: 3, 4: 4}
_KERNELS: dict[Any, tuple[Any, Mapping[int, int]]] = {
    _ATEN._fused_sgd.tensor_lr: (_ATEN._fused_sgd_.tensor_lr, {0: 0, 2: 2}),
    _ATEN._fused_adam.tensor_lr: (_ATEN._fused_adam_.tensor_lr, _ADAM),
    _ATEN._fused_adamw.tensor_lr: (_ATEN._fused_adamw_.tensor_lr, _ADAM),
}
"""By kernel of an optimizer, its form in place, and by output which argument it is written into: lists of tensors."""


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
                (node.args[argument], {int(user.args[1]): user for user in lists[number].users})
                for number, argument in written.items()
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
        owners[node] = owners[_source(node)] if _lies_in(node) else node
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


def _lies_in(node: Node) -> bool:
    """Return whether a node's result lies in the memory of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is getitem:
        return _lies_in(node.args[0])
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
