"""Fewer and cheaper calls, less memory, and writes into its arguments for a traced graph whose operations are pure.

Equal operations become one where that costs little memory (`with_shared_values`), what changes nothing is left out, the
outputs are written into the arguments that they replace, by the kernels of optimizers where these can (`add_writes`),
and elementwise operations write into a tensor that nothing reads any more (`reuse_memory`).
"""

from collections.abc import Hashable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from mlotool.core.private import tree_flatten
from mlotool.problem.optimizers.registry import RULES

_ATEN = torch.ops.aten
_IDENTITIES = {_ATEN.alias.default, _ATEN.detach.default}
_RESHAPES = {_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.expand.default}
_METHODS = {"view": Tensor.view, "expand": Tensor.expand, "t": Tensor.t, "clone": Tensor.clone}
_STEPS = {_ATEN._foreach_add.Scalar, *(kernel.pure for rule in RULES.values() for kernel in rule.kernels)}
"""What optimizers step by: functions of lists of tensors, which have a form in place."""

LARGE = 1 << 20
"""Bytes up to which a value is always kept for its next use."""


def simplified(module: GraphModule) -> GraphModule:
    """Return a module of the same function with equal operations shared and identities left out.

    Args:
        module: of aten operations without autograd, none of them in place.
    """
    graph = module.graph
    _remove_identities(graph)
    shared = with_shared_values(graph)
    _remove_identities(shared)
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
    output = graph.output_node()
    if in_place:
        _step_in_place(graph, places, output)
    outputs: list[Any] = [*output.args[0]]  # type: ignore[misc]
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
    copies = [node for node in graph.nodes if node.target is _ATEN.copy_.default and not node.users]
    if len(copies) > 1:
        with graph.inserting_before(copies[-1]):
            places, values = zip(*[node.args for node in copies], strict=True)
            graph.call_function(_ATEN._foreach_copy_.default, (list(places), list(values)))
        for node in copies:
            graph.erase_node(node)
    reuse_memory(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _direct(node.target)
    return GraphModule(module, graph)


def with_shared_values(graph: Graph) -> Graph:
    """Return a graph of the same function in which equal operations on equal values are one.

    A value that has several uses takes memory until the last one. Products of one vector after the other share what
    does not depend on the vector: so an elementwise operation with a large result that nothing waits for is left to be
    taken again, which takes little time beside the operations around it. Operations that draw random numbers or write
    stay as they are.

    Args:
        graph: of operations, each with an example of its result noted.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> twice = make_fx(lambda x: x.exp() + x.exp())(torch.ones(3))
        >>> [node.name for node in with_shared_values(twice.graph).nodes]
        ['x_1', 'exp', 'add', 'output']
    """
    last, shared = _last_uses(graph), Graph()
    numbers: dict[Node, int] = {}
    number_of: dict[Hashable, int] = {}
    # By number: the node in the new graph, those that it reads, and until when nodes of the old graph read it.
    current: dict[int, Node] = {}
    read: dict[int, list[Node]] = {}
    wanted_until: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        inputs = [current[numbers[source]] for source in node.all_input_nodes]
        number = numbers[node] = number_of.setdefault(_key(node, numbers), len(number_of))
        until = last.get(_owner(node), position)
        is_stale = number not in current or (_is_view(node) and read[number] != inputs)
        is_dead = not is_stale and wanted_until[number] < position and _num_bytes(node) > LARGE
        if is_stale or (is_dead and torch.Tag.pointwise in getattr(node.target, "tags", ())):
            current[number] = shared.node_copy(node, lambda source: current[numbers[source]])
            read[number], wanted_until[number] = inputs, until
        else:
            wanted_until[number] = max(wanted_until[number], until)
    shared.eliminate_dead_code()
    return shared


def reuse_memory(graph: Graph) -> None:
    """Let elementwise operations write into their first argument where they are its last use.

    The values are the same to the bit. A new tensor costs its allocation and, where it is large, a way through memory
    that no cache has seen.

    Args:
        graph: of operations, each with an example of its result noted; it is changed.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> module = make_fx(lambda x: (x + 1).exp())(torch.zeros(3))
        >>> reuse_memory(module.graph)
        >>> module.recompile()
        >>> x = torch.zeros(3)
        >>> module(x), x
        (tensor([2.7183, 2.7183, 2.7183]), tensor([0., 0., 0.]))
    """
    last = _last_uses(graph)
    for position, node in enumerate(graph.nodes):
        place, form = node.args[0] if node.args else None, _in_place(node.target)
        if form is None or torch.Tag.pointwise not in node.target.tags or not isinstance(place, Node):
            continue
        owner = _owner(place)
        others = [_owner(other) for other in node.all_input_nodes if other is not place]
        is_free = owner.op == "call_function" and last[owner] == position and owner not in others
        # Elements that share a place cannot be written one by one.
        if is_free and is_alike(place, node) and not torch._debug_has_internal_overlap(place.meta["val"]):
            # From now on the result is in the memory of its argument.
            node.target = form
            last[owner] = last.get(node, position)


def is_alike(first: Node, second: Node) -> bool:
    """Return whether the results of two operations have the same shape, strides, type and device, as noted."""
    values = [node.meta.get("val") for node in (first, second)]
    strided = [x for x in values if isinstance(x, Tensor) and x.layout is torch.strided]
    forms = [(x.shape, x.stride(), x.dtype, x.device) for x in strided]
    return len(forms) == 2 and forms[0] == forms[1]


def _in_place(target: Any) -> Any:
    """Return the form of a pure operation that writes into its first argument; None where there is none."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    packet = getattr(_ATEN, f"{target._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, target._overloadname, None)


def _step_in_place(graph: Graph, places: Sequence[Node], output: Node) -> None:
    """Let the kernels of optimizers write where they can."""
    numbers = {place: number for number, place in enumerate(places)}
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target in _STEPS]:
        values: Any = output.args[0]
        form = _in_place(node.target)
        written = [number for number, each in enumerate(form._schema.arguments) if each.is_write]
        parts = {user.args[1]: user for user in node.users}
        # By argument that is written, what takes the list of its results.
        lists = {written[0]: node} if len(written) == 1 else {each: parts.get(n) for n, each in enumerate(written)}
        pairs = [
            (place, next((user for user in results.users if user.args[1] == index), None))
            for argument, results in lists.items()
            if results is not None
            for index, place in enumerate(node.args[argument])
        ]
        if all(
            place in numbers and values[numbers[place]] is value and not _is_read_after(place, node, order)
            for place, value in pairs
        ):
            node.target = form
            for place, value in pairs:
                assert value is not None
                value.replace_all_uses_with(place)
    for node in reversed([*graph.nodes]):
        if node.target is getitem and not node.users:
            graph.erase_node(node)


def _is_read_after(place: Node, node: Node, order: Mapping[Node, int]) -> bool:
    """Return whether something reads a place, or a view of it, after a node."""
    return any(
        (user.op != "output" and order[user] > order[node]) or (_is_view(user) and _is_read_after(user, node, order))
        for user in place.users
    )


def _remove_identities(graph: Graph) -> None:
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if isinstance(source, Node) and (
            node.target in _IDENTITIES
            or (node.target in _RESHAPES and is_alike(node, source))
            or (node.target is _ATEN.mul.Tensor and node.args[1] == 1 and is_alike(node, source))
        ):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _direct(target: Any) -> Any:
    """Return the Python binding of an aten operation: it parses its arguments in half the time."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return target
    name = target._schema.name.removeprefix("aten::")
    if name in _METHODS:
        return _METHODS[name]
    if name.endswith("_") and not name.startswith("_") and hasattr(Tensor, name):
        return getattr(Tensor, name)
    return getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C._nn, name, None) or target


def _key(node: Node, numbers: Mapping[Node, int]) -> Hashable:
    """Return what is equal for equal operations on equal values, of which taking one twice is taking it once."""
    target = node.target
    if node.op not in ("call_function", "get_attr") or (
        isinstance(target, OpOverload)
        and (torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable)
    ):
        return node
    leaves, structure = tree_flatten((node.args, node.kwargs))
    # As text, a zero differs from a negative one and NaN is itself; the type tells 1 from True.
    return (
        target,
        structure,
        *[(Node, numbers[leaf]) if isinstance(leaf, Node) else (type(leaf), repr(leaf)) for leaf in leaves],
    )


def _last_uses(graph: Graph) -> dict[Node, int]:
    """Return at which position the memory of each node is read last, through views too."""
    return {_owner(source): at for at, node in enumerate(graph.nodes) for source in node.all_input_nodes}


def _owner(node: Node) -> Node:
    """Return the node whose memory a node is in."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: Node) -> bool:
    """Return whether a node's result lies in the memory of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is getitem:
        return _is_view(node.args[0])
    if node.target is _ATEN._unsafe_view.default:
        return True
    return isinstance(node.target, OpOverload) and any(
        result.alias_info is not None for result in node.target._schema.returns
    )


def _num_bytes(node: Node) -> int:
    """Return the bytes of one tensor; a tuple has none of its own."""
    value = node.meta.get("val")
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0
