"""How a flat program of tensor operations is run, and what is done to its graph before.

Equal operations become one where that costs little memory (`with_shared_values`), what changes nothing is left out, and
the outputs are written into the arguments that they replace, by the kernels of optimizers where these can
(`add_writes`). The operations are pure.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from mlotool.core.private import schema_of, tree_flatten
from mlotool.problem.optimizers.registry import RULES
from mlotool.program.decompositions import FUSIBLE

_ATEN = torch.ops.aten
_IDENTITIES = {_ATEN.alias.default, _ATEN.detach.default}
_RESHAPES = {_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.expand.default}
_METHODS = {"view": Tensor.view, "expand": Tensor.expand, "t": Tensor.t, "clone": Tensor.clone}
# What optimizers step by: functions of lists of tensors, which have a form in place.
_STEPS = {_ATEN._foreach_add.Scalar, *(kernel.pure for rule in RULES.values() for kernel in rule.kernels)}

# Bytes up to which a value is always kept for its next use.
LARGE = 1 << 20

# `(parameters, optimizers' state, rates, buffers, tensors of the batches) -> outputs`.
Run = Callable[..., Sequence[Tensor]]

# Records a function; returns what replays it, and its outputs, which a replay fills anew.
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], None], Sequence[Tensor]]]

# Makes what runs a graph, for such arguments, of which the first so many stay where they are from run to run.
Finish = Callable[[GraphModule, Sequence[Tensor], int], Run]


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run.

    Args:
        finish: makes what runs a graph.
        has_fused_steps: whether optimizers step by torch's fused kernels, as without a trace; else by plain operations,
            which a compiler fuses with what is around them.
        decompositions: for `make_fx`, by operation what it consists of.
    """

    finish: Finish
    has_fused_steps: bool
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)

    def made(
        self, flat: GraphModule, arguments: Sequence[Tensor], num_moved: int, *, in_place: bool
    ) -> tuple[Run, tuple[int, ...]]:
        """Return what runs a graph, and the positions of the arguments that change, where that is left to the caller.

        Args:
            flat: its first outputs are what its first arguments are to become.
            arguments: examples.
            num_moved: how many of them these are; all but the batches.
            in_place: whether it writes them itself.
        """
        graph = simplified(flat)
        writes = add_writes(graph, num_moved, in_place=in_place)
        return self.finish(graph, arguments, num_moved), writes


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


def with_shared_values(graph: Graph) -> Graph:
    """Return a graph of the same function in which equal operations on equal values are one.

    A value that has several uses takes memory until the last one. Products of one vector after the other share what
    does not depend on the vector: so an elementwise operation with a large result that nothing waits for is left to be
    taken again. Operations that draw random numbers or write stay as they are.

    Args:
        graph: of operations, each with an example of its result noted.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> twice = make_fx(lambda x: x.exp() + x.exp())(torch.ones(3))
        >>> [node.name for node in with_shared_values(twice.graph).nodes]
        ['x_1', 'exp', 'add', 'output']
    """
    # At which position the memory of each node is read last, through views too.
    last = {_owner(source): at for at, node in enumerate(graph.nodes) for source in node.all_input_nodes}
    shared, numbers, number_of = Graph(), dict[Node, int](), dict[Hashable, int]()
    # By number: the node in the new graph, those that it reads, and until when nodes of the old graph read it.
    current: dict[int, tuple[Node, list[Node], int]] = {}
    for position, node in enumerate(graph.nodes):
        inputs = [current[numbers[source]][0] for source in node.all_input_nodes]
        number = numbers[node] = number_of.setdefault(_key(node, numbers), len(number_of))
        until = last.get(_owner(node), position)
        copy, read, wanted = current.get(number, (None, [], 0))
        is_large = isinstance(value := node.meta.get("val"), Tensor) and value.numel() * value.dtype.itemsize > LARGE
        is_dead = is_large and wanted < position and torch.Tag.pointwise in getattr(node.target, "tags", ())
        if copy is None or is_dead or (_is_view(node) and read != inputs):
            copy, wanted = shared.node_copy(node, lambda source: current[numbers[source]][0]), until
        current[number] = copy, inputs, max(wanted, until)
    shared.eliminate_dead_code()
    return shared


def reuse_memory(graph: Graph) -> None:
    """Let elementwise operations write into an argument that nothing reads any more; values are the same to the bit.

    A new tensor costs its allocation and, where it is large, a way through memory that no cache has seen.

    Args:
        graph: of operations, each with an example of its result noted; it is changed.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> module = make_fx(lambda x: (x + 1).exp())(torch.zeros(3))
        >>> reuse_memory(module.graph)
        >>> [node.target for node in module.graph.nodes if node.op == "call_function"]
        [<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.exp_', overload='default')>]
    """
    last = {_owner(source): at for at, node in enumerate(graph.nodes) for source in node.all_input_nodes}
    for at, node in enumerate(graph.nodes):
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        is_symmetric = node.target in (_ATEN.mul.Tensor, _ATEN.add.Tensor) and not node.kwargs
        for place in [x for x in node.args[: 1 + is_symmetric] if isinstance(x, Node)]:
            owner, others = _owner(place), [_owner(x) for x in node.all_input_nodes if x is not place]
            is_free = owner.op == "call_function" and last[owner] == at and owner not in others
            if is_free and _is_alike(place, node) and place.meta["val"].is_contiguous() and _write_into(node, place):
                # What reads the result reads this memory: an operation in place counts as a view.
                last[owner] = last.get(node, at)
                break


def _write_into(node: Node, place: Node) -> bool:
    """Let an operation write into one of its arguments, if there is such a form of it."""
    form = _in_place(node.target)
    if form is None:
        return False
    node.target = form
    node.args = node.args if node.args[0] is place else (place, node.args[0])
    return True


def _in_place(target: Any) -> Any:
    """Return the form of an operation that writes into its first argument; None where there is none."""
    schema = schema_of(target)
    forms, overload = getattr(_ATEN, f"{schema.name.removeprefix('aten::')}_", None), schema.overload_name or "default"
    has_one = not schema.is_mutable and forms is not None and overload in forms.overloads()
    return getattr(forms, overload) if has_one else None


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
    if in_place and changed:
        with graph.inserting_before(output):
            pair = [places[position] for position in changed], [values[position] for position in changed]
            graph.call_function(_ATEN._foreach_copy_.default, pair)
    if in_place:
        output.args = (tuple(others),)
    else:
        output.args = ((*others[:-1], *[values[position] for position in changed], others[-1]),)
    module.recompile()
    return () if in_place else tuple(changed)


class GraphedRun:
    """Runs a program by a recording of it, which reads and writes at the addresses of the tensors it was made with.

    Parameters, optimizers' state and buffers stay where they are; where one has moved, the program is recorded anew.
    Batches are copied to where the recording reads them; outputs are copies.

    Args:
        run: the program.
        num_fixed: how many of its first arguments stay where they are.
        capture: records; `captured` for CUDA.
    """

    def __init__(self, run: Run, num_fixed: int, capture: Capture) -> None:
        self._run = run
        self._num_fixed = num_fixed
        self._capture = capture
        self._addresses: list[int] = []
        self._batches: list[Tensor] = []
        self._outputs: Sequence[Tensor] = []
        self._replay: Callable[[], None] = lambda: None

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return the outputs; arguments that the program writes are written."""
        fixed, batches = arguments[: self._num_fixed], arguments[self._num_fixed :]
        addresses = [tensor.data_ptr() for tensor in fixed]
        if addresses != self._addresses:
            self._record(fixed, batches)
            self._addresses = addresses
        elif batches:
            torch._foreach_copy_(self._batches, batches)
        self._replay()
        return [output.clone() for output in self._outputs]

    def _record(self, fixed: Sequence[Tensor], batches: Sequence[Tensor]) -> None:
        self._batches = [tensor.detach().clone() for tensor in batches]
        # A run before the recording sets libraries up, and is taken back.
        before = [tensor.detach().clone() for tensor in fixed]
        self._run(*fixed, *self._batches)
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in fixed], before)
        self._replay, self._outputs = self._capture(lambda: self._run(*fixed, *self._batches))


def captured(function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Record a function as a CUDA graph.

    Raises:
        RuntimeError: it does what a graph cannot hold, such as to wait for the device.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs


def _eager(graph: GraphModule, arguments: Sequence[Tensor], num_fixed: int) -> Run:
    reuse_memory(graph.graph)
    # By the shortest way; nothing of torch's can read the graph any more.
    for node in graph.graph.nodes:
        node.target = _direct(node.target) if node.op == "call_function" else node.target
    return GraphModule(graph, graph.graph).forward


def _inductor(graph: GraphModule, arguments: Sequence[Tensor], num_fixed: int) -> Run:
    import torch._inductor

    for node in graph.graph.nodes:
        # The shapes that tracing has noted are of another mode than the compiler's.
        node.meta.clear()
    # In C++ what calls the kernels takes half the time that it takes in Python.
    options = {"cpp_wrapper": all(tensor.device.type == "cpu" for tensor in arguments)}
    with torch.no_grad():
        compiled: Run = torch._inductor.compile(graph, [*arguments], options=options)
    return compiled


def _cuda_graph(graph: GraphModule, arguments: Sequence[Tensor], num_fixed: int) -> Run:
    if any(not tensor.is_cuda for tensor in arguments):
        raise LookupError("a CUDA graph reads no tensors on the CPU, and some parameters, states or batches are there")
    run = GraphedRun(_eager(graph, arguments, num_fixed), num_fixed, captured)
    # On examples: what cannot be recorded says so before anything depends on it.
    run(*[tensor.clone() for tensor in arguments])
    return run


# Operation by operation; as kernels that PyTorch's compiler has fused; or as a CUDA graph, one launch for all.
BACKENDS = {
    "eager": Backend(_eager, has_fused_steps=True),
    "inductor": Backend(_inductor, has_fused_steps=False, decompositions=FUSIBLE),
    "cuda_graph": Backend(_cuda_graph, has_fused_steps=True),
}


def _step_in_place(graph: Graph, places: Sequence[Node], output: Node) -> None:
    """Let the kernels of optimizers write where they can."""
    numbers = {place: number for number, place in enumerate(places)}
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target in _STEPS]:
        values: Any = output.args[0]
        form = _in_place(node.target)
        written = [number for number, argument in enumerate(schema_of(form).arguments) if argument.is_write]
        parts = {user.args[1]: user for user in node.users}
        # By argument that is written, what takes the list of its results.
        lists = {written[0]: node} if len(written) == 1 else {number: parts.get(n) for n, number in enumerate(written)}
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
        if not isinstance(source, Node):
            continue
        if (
            node.target in _IDENTITIES
            or (node.target in _RESHAPES and _is_alike(node, source))
            or (node.target is _ATEN.mul.Tensor and node.args[1] == 1 and _is_alike(node, source))
        ):
            node.replace_all_uses_with(source)
        elif node.target is source.target is _ATEN.t.default:
            # The gradient of a linear layer's weight is transposed twice.
            [twice] = source.all_input_nodes
            node.replace_all_uses_with(twice)
        elif _drops_axes(node, source):
            # As the gradient of its bias has it.
            source.args, source.meta = (*source.args[:2], False), dict(node.meta)
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _drops_axes(node: Node, source: Node) -> bool:
    """Return whether a view leaves out the axes that a sum over them has kept for it alone."""
    if node.target is not _ATEN.view.default or source.target is not _ATEN.sum.dim_IntList:
        return False
    if len(source.users) > 1 or source.kwargs or source.args[2:] != (True,):
        return False
    # A sum over all axes keeps none of them.
    [summed], axes = source.all_input_nodes, source.args[1]
    if not isinstance(axes, list):
        return False
    shape = summed.meta["val"].shape
    left_out = {axis % len(shape) for axis in axes}
    return [*node.meta["val"].shape] == [size for axis, size in enumerate(shape) if axis not in left_out]


def _is_alike(first: Node, second: Node) -> bool:
    """Return whether the results of two operations have the same shape, strides, type and device, as noted."""
    values = [node.meta.get("val") for node in (first, second)]
    strided = [x for x in values if isinstance(x, Tensor) and x.layout is torch.strided]
    forms = [(x.shape, x.stride(), x.dtype, x.device) for x in strided]
    return len(forms) == 2 and forms[0] == forms[1]


def _direct(target: Any) -> Any:
    """Return the Python binding of an aten operation: it parses its arguments in half the time."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return target
    schema = schema_of(target)
    # A graph leaves out arguments that have their default: the mean, which is not what the binding takes for it.
    if any(argument.name == "reduction" for argument in schema.arguments):
        return target
    name = schema.name.removeprefix("aten::")
    if name in _METHODS:
        return _METHODS[name]
    if name.endswith("_") and not name.startswith("_") and hasattr(Tensor, name):
        return getattr(Tensor, name)
    return getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C._nn, name, None) or target


def _key(node: Node, numbers: Mapping[Node, int]) -> Hashable:
    """Return what is equal for equal operations on equal values, of which taking one twice is taking it once."""
    target, is_operation = node.target, node.op in ("call_function", "get_attr")
    if isinstance(target, OpOverload):
        is_operation &= torch.Tag.nondeterministic_seeded not in target.tags and not schema_of(target).is_mutable
    if not is_operation:
        return node
    leaves, structure = tree_flatten((node.args, node.kwargs))
    # As text, a zero differs from a negative one and NaN is itself; the type tells 1 from True.
    values = [(Node, numbers[leaf]) if isinstance(leaf, Node) else (type(leaf), repr(leaf)) for leaf in leaves]
    return target, structure, *values


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
        result.alias_info is not None for result in schema_of(node.target).returns
    )
