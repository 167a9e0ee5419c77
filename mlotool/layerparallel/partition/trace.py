"""A module's forward as a graph of its layers and blocks, and a part of it between two cuts.

Sizes, types and devices that a forward asks of a layer's output are told from the module's inputs instead: a mask that
is made for `x.shape[1]` tokens, where x is what an embedding has returned, would have to go on beside x past every cut.
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute

from mlotool.core.bound_module import Slots
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.private import BatchNorm as _BatchNorm
from mlotool.core.private import device_mode as _device
from mlotool.core.private import tree_leaves, tree_map_only

# What a module is called with, in the order of its forward's arguments.
Inputs = tuple[Any, ...]


class Stage:
    """A part of a module between two cuts.

    From stage to stage exactly one tensor passes, the state. What a later part needs of the module's inputs without any
    parameter, such as a mask of padding, that part computes again from the inputs.

    Args:
        module: the whole module; the stage runs its layers themselves, not copies.
        graph: the operations of the stage; its placeholders are the state (except in the first stage) and the inputs.
        is_first: whether the stage starts from the inputs alone.

    Attributes:
        module: the whole module.
        parameters: those that the stage uses, by their names in the module.
        layers: names of the modules that it calls.

    Example:
        >>> from mlotool.layerparallel.partition.chain import partition
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> first, last = partition(net, 2, cut=["2"])
        >>> state = first(None, (torch.zeros(4, 2),))
        >>> state.shape, last(state, (torch.zeros(4, 2),)).shape, list(last.parameters)
        (torch.Size([4, 8]), torch.Size([4, 1]), ['2.weight', '2.bias'])
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, is_first: bool) -> None:
        self.graph = graph
        self.is_first = is_first
        self.layers = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        used = tensors_of(module, graph.nodes)
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in used}
        self.module = module
        self._interpreter = fx.Interpreter(module, graph=graph)

    def __call__(self, state: Tensor | None, inputs: Inputs) -> Any:
        """Return the next state (s, ...) of a batch of s samples; the last stage returns what the module returns.

        Args:
            state: (s, ...), where the stage before has stopped; the first stage does not look at it.
            inputs: of the whole module.
        """
        return self._interpreter.run(*(inputs if self.is_first else (state, *inputs)))

    def pass_both_ways(self, state: Tensor | None, inputs: Inputs) -> None:
        """Run the stage forward and backward, and forget what it finds: the work of a training step.

        Args:
            state: as for a call.
            inputs: as for a call.
        """
        with torch.enable_grad():
            begin = None if state is None else state.detach()
            if begin is not None and begin.is_floating_point():
                begin.requires_grad_()
            ends = [end for end in tree_leaves(self(begin, inputs)) if isinstance(end, Tensor) and end.requires_grad]
        points = [point for point in (begin, *self.parameters.values()) if point is not None and point.requires_grad]
        if ends and points:
            torch.autograd.grad(ends, points, list(map(torch.ones_like, ends)), allow_unused=True)

    @contextmanager
    def averaging(self, count: int) -> Iterator[None]:
        """While it lasts, a pass averages BatchNorm's running statistics with those of `count` earlier collections.

        The first collection then leaves nothing of the initial statistics. Once `1 / (count + 1)` is below the layers'
        own momentum, that is in force.

        Args:
            count: passes that have collected the statistics before.
        """
        layers = (self.module.get_submodule(layer) for layer in self.layers)
        norms = [norm for layer in layers for norm in layer.modules() if isinstance(norm, _BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None if norm.momentum is None else max(norm.momentum, 1.0 / (count + 1))
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum

    def buffers(self) -> dict[str, Tensor]:
        """Return the stage's buffers themselves, by their names in the module."""
        prefixes = tuple(f"{layer}." for layer in self.layers)
        return {name: buffer for name, buffer in self.module.named_buffers() if name.startswith(prefixes)}


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """While it lasts, run a module as it trains, and leave no trace: its buffers and random numbers are put back.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> with undisturbed(norm):
        ...     _ = norm(torch.ones(4, 1))
        >>> norm.running_mean
        tensor([0.])
    """
    places = Slots(module)
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(sorted(device.index or 0 for device in devices)), ExitStack() as stack:
        stack.callback(places.fill({}, places.copy_buffers()))
        yield


def tensors_of(module: nn.Module, nodes: Iterable[fx.Node]) -> set[int]:
    """Return the identities (`id`) of the parameters and buffers that operations of a traced module use.

    Args:
        module: that was traced.
        nodes: some of its operations.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> tensors_of(net, fx.symbolic_trace(net).graph.nodes) == {id(each) for each in net.parameters()}
        True
    """
    tensors: list[Any] = []
    for node in nodes:
        if node.op == "get_attr":
            tensors.append(attrgetter(str(node.target))(module))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            tensors += [*layer.parameters(), *layer.buffers()]
    return set(map(id, tensors))


# Records an operation: kind, target, arguments by position, arguments by name.
Create = Callable[..., fx.Node]


def told_by_inputs(node: fx.Node, values: Mapping[fx.Node, Any], create: Create, key: str, place: str) -> fx.Node:
    """Return a node with the same value that follows from the inputs alone; the node itself where that is not needed.

    A size is taken from the first input that has it along the same axis, and is a constant where no input has. An
    operation beside the layer's output refuses batches for which the two differ.

    Args:
        node: that was recorded last.
        values: of all nodes, for the batch that the forward is traced with.
        create: records further ones.
        key: of the setting that the module belongs to, for messages.
        place: in the user's code, for messages.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> size = graph.call_method("size", (x, 0))
        >>> told_by_inputs(size, {x: torch.ones(2), size: 2}, graph.create_node, "parallel", "here") is size
        True
    """
    asked = _asked(node)
    if asked is None or asked.op == "placeholder" or not isinstance(values.get(asked), Tensor):
        return node
    value = values[node]
    told = _of_an_input(node, value, values, create) or create("call_function", _constant, (value,), {})
    create("call_function", _check_same, (node, told, key, place), {})
    return told


def _asked(node: fx.Node) -> fx.Node | None:
    """Return the node whose size, type or device a node is."""
    args = node.args
    if not args or not isinstance(args[0], fx.Node):
        return None
    source, is_method, is_attribute = args[0], node.op == "call_method", node.target is getattr
    if is_method and (node.target == "dim" or (node.target == "size" and len(args) == 2)):
        return source
    if is_attribute and args[1] in ("device", "dtype", "ndim"):
        return source
    is_size = source.op == "call_method" and source.target == "size" and len(source.args) == 1
    is_shape = is_size or (source.target is getattr and source.args[1] == "shape")
    if node.target is operator.getitem and isinstance(args[1], int) and is_shape:
        return source.args[0] if isinstance(source.args[0], fx.Node) else None
    return None


def _of_an_input(node: fx.Node, value: Any, values: Mapping[fx.Node, Any], create: Create) -> fx.Node | None:
    inputs = [source for source in values if source.op == "placeholder" and isinstance(values[source], Tensor)]
    if isinstance(value, torch.device):
        return create("call_function", getattr, (inputs[0], "device"), {}) if inputs else None
    axis = node.args[1] if len(node.args) > 1 else None
    if not isinstance(value, int) or not isinstance(axis, int):
        return None
    # Another axis of the same size may be so by chance: a batch of 16 beside a width of 16.
    fitting = (given for given in inputs if 0 <= axis < values[given].dim() and values[given].shape[axis] == value)
    source = next(fitting, None)
    return None if source is None else create("call_method", "size", (source, axis), {})


def _constant(value: Any) -> Any:
    return value


def _check_same(answer: Any, expected: Any, key: str, place: str) -> None:
    """Refuse a batch for which a layer's output has another size than the stages take from the inputs."""
    if answer != expected:
        fault = f"{key}: the forward asks for a size, type or device at {place}, which is {answer} for this batch"
        raise RunError(
            f"{fault} and {expected} by its inputs, which the stages follow. Read it from the module's input instead."
        )


# Operations that `told_by_inputs` adds.
TOLD = (_constant, _check_same)


_MADE_BY_SIZES = ("ones", "zeros", "empty", "rand", "randn")
_DRAWING = re.compile(
    "drop|rand|normal(?!ize)|uniform|bernoulli|multinomial|poisson|exponential|cauchy|geometric|rrelu|gumbel"
)


def draws(node: fx.Node) -> bool:
    """Say whether an operation draws random numbers, by its name.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> [draws(graph.call_function(each, (x,))) for each in (torch.relu, torch.bernoulli)]
        [False, True]
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return _DRAWING.search(name) is not None


def without_gradient(value: Any) -> Any:
    """Return a value that the forward has computed with gradients switched off, wherever it is computed again.

    Example:
        >>> without_gradient(torch.ones(1, requires_grad=True) * 2).requires_grad
        False
    """
    return tree_map_only(Tensor, Tensor.detach, value)


def casts() -> list[object]:
    """Return what autocast does now, on the CPU and on GPUs.

    Example:
        >>> casts()[0]
        (False, torch.bfloat16)
    """
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


# The argument of a module of equal layers that says which of them run, as `mlotool.layerparallel.Layers` has it.
LAYERS = "layers"

# Files and folders of code that stands between a forward and its operations, the last one with a default device.
_BETWEEN = (__file__, *fx.__path__, _device.__file__)


def _in_a_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of sizes that also takes stand-ins for them, of which torch asks that they be in a tuple."""

    @functools.wraps(function)
    def call(*sizes: Any, **kwargs: Any) -> Any:
        is_several = len(sizes) > 1 and any(issubclass(type(size), fx.Proxy) for size in sizes)
        return function(sizes, **kwargs) if is_several else function(*sizes, **kwargs)

    return call


def traced(
    module: nn.Module, key: str, inputs: Inputs | None, inside: Sequence[str] | None = None, opened: Container[str] = ()
) -> fx.Graph:
    """Return the operations of a module's forward, with blocks and torch's own layers as black boxes.

    Its steps may depend on values: they are those for these inputs, and each decision becomes an operation that says so
    where a later batch would decide otherwise. Without inputs they may depend on none.

    Args:
        module: children of a Sequential, ModuleList or ModuleDict are blocks; so is each layer of `Layers`.
        key: of the module, for messages.
        inputs: what the module is called with, in the order of its forward's arguments; None: nothing is known.
        inside: names of blocks; only the modules that hold one of them are looked into. None looks into all.
        opened: names of blocks that are looked into like the module itself.

    Raises:
        ConfigError: it cannot be traced.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.ReLU())
        >>> [node.op for node in traced(net, "module", (torch.ones(2, 3),)).nodes]
        ['placeholder', 'call_module', 'call_module', 'output']
    """
    tracer = _ValueTracer(inside, opened, key, inputs)
    arguments = inspect.signature(module.forward).parameters
    values = [argument.default for argument in arguments.values()] if inputs is None else inputs
    # Python code may ask for these directly.
    named = zip(arguments, values, strict=False)
    plain = {name: value for name, value in named if value is None or isinstance(value, bool | str)}
    makers: dict[str, Any] = {name: _in_a_tuple(getattr(torch, name)) for name in _MADE_BY_SIZES}
    try:
        with undisturbed(module), torch.enable_grad(), mock.patch.multiple(torch, **makers):
            graph = tracer.trace(module, plain)
        if any("*" in str(node.target) for node in graph.nodes if node.op == "placeholder"):
            raise TypeError("forward takes *args or **kwargs")
    except Exception as error:  # tracing runs the user's forward on stand-ins, which may fail in any way
        # What fails without any stand-in as well is the user's to see as it is.
        with undisturbed(module), torch.no_grad():
            _ = inputs is None or module(*inputs)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        advice = "Name the blocks before which it may be cut, as in cut: [blocks.3]."
        advice = "Give example inputs, so that decisions by their values can be followed." if inputs is None else advice
        fault = f"{key}: the forward of {type(module).__name__} cannot be cut into stages ({reason})"
        raise ConfigError(f"{fault}; expected one that calls its blocks with tensors. {advice}") from error
    return graph


def recomputed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values that follow from the inputs without a layer, a parameter or a random number.

    Args:
        nodes: operations of a traced forward, in their order.

    Example:
        >>> class Scaled(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 2)
        ...     def forward(self, x, mask):
        ...         return self.layer(x) * (1 - mask)
        >>> graph = traced(Scaled(), "module", (torch.ones(1, 2), torch.ones(1, 2)))
        >>> sorted(node.name for node in recomputed(graph.nodes))
        ['sub']
    """
    following: set[fx.Node] = set()
    for node in nodes:
        is_plain = node.op in ("call_function", "call_method") and not draws(node)
        if is_plain and all(source.op == "placeholder" or source in following for source in node.all_input_nodes):
            following.add(node)
    return following


class _ValueTracer(fx.Tracer):
    """Records a forward beside its values for given inputs, by which its Python code may decide; without any, alone.

    Blocks are leaves: what they do inside need not be traceable, and is not for a cut.
    """

    # A buffer that is read becomes an operation, so that it may move to another device or change.
    proxy_buffer_attributes = True

    def __init__(self, inside: Sequence[str] | None, opened: Container[str], key: str, inputs: Inputs | None) -> None:
        super().__init__(param_shapes_constant=False)
        self._inside, self._opened = inside, opened
        self._casts, self._key = casts(), key
        self._inputs = None if inputs is None else iter(inputs)
        self._interpreter: fx.Interpreter | None = None
        self._is_running = False
        self._calls: dict[fx.Node, object] = {}

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operation; where the forward has switched gradients off, its value without one."""
        if casts() != self._casts:
            raise TypeError("it switches autocast; set the problem's precision in place of that")
        node = self.record(*args, **kwargs)
        if torch.is_grad_enabled() or not node.op.startswith("call"):
            return node
        return self.record("call_function", without_gradient, (node,), {})

    def record(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operation, and carry it out."""
        node: fx.Node = super().create_node(*args, **kwargs)
        if self._inputs is None:
            return node
        if self._interpreter is None:
            self._interpreter = fx.Interpreter(self.root, garbage_collect_values=False, graph=self.graph)
        env = self._interpreter.env
        if node.op == "placeholder":
            value = next(self._inputs)
            # Its own: a forward may change what it is given.
            env[node] = value.clone() if isinstance(value, Tensor) else value
        elif node.op != "output":
            self._forget_questions(node)
            # The tracer sees what a block does as well: it is not recorded.
            self._is_running = True
            try:
                env[node] = self._interpreter.run_node(node)
            finally:
                self._is_running = False
            return told_by_inputs(node, env, self.record, self._key, _place())
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether a module is one operation."""
        name = module_qualified_name
        if self._inside is not None:
            return not any(block.startswith(f"{name}.") for block in self._inside)
        if name in self._opened:
            return False
        # Containers of blocks among torch's own modules, such as nn.TransformerEncoder, are looked into.
        if super().is_leaf_module(m, name) and not any(isinstance(child, nn.ModuleList) for child in m.children()):
            return True
        assert isinstance(self.root, nn.Module)
        parent = self.root.get_submodule(name.rpartition(".")[0])
        return isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict) and not isinstance(m, nn.Sequential)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a module's call, or only carry it out inside a block; equal layers become a call for each layer."""
        if self._is_running:
            return forward(*args, **kwargs)
        if not has_layers(m) or len(args) != 1 or kwargs:
            return super().call_module(m, forward, args, kwargs)
        [state], name = args, self.path_of_module(m)
        for number in range(m.num_layers):  # type: ignore[arg-type]
            state = self.create_proxy("call_module", name, (state,), {LAYERS: range(number, number + 1)})
        return state

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the stand-in for a node's value."""
        return super().proxy(node) if self._inputs is None else _Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a parameter's stand-in, or inside a block the parameter."""
        return attr_val if self._is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """Return what a node takes for an argument; a stand-in passes for a tensor, so it comes first."""
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def value(self, proxy: fx.Proxy) -> Any:
        """Return the value that a stand-in has for the given inputs."""
        assert self._interpreter is not None
        return self._interpreter.env[proxy.node]

    def decided(self, proxy: fx.Proxy, kind: Any) -> Any:
        """Return a plain number or truth, and record that the forward has gone on by it."""
        if self._inputs is None:
            raise TypeError("it decides by values")
        answer = kind(self.value(proxy))
        arguments = (proxy, kind.__name__, answer, self._key, _place())
        self._calls[self.create_proxy("call_function", _check_decision, arguments, {}).node] = _call()
        return answer

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the truth of a value."""
        return bool(self.decided(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return the entries of a value, as many as it has."""
        return iter([operator.getitem(obj, number) for number in range(self.decided(obj, len))])

    def _forget_questions(self, node: fx.Node) -> None:
        """Drop the decisions before an operation of torch's that has asked whether its argument is a number.

        `torch.full((n, n), 0.0)` asks n for its value, once or more, and is recorded with the stand-in for n all the
        same: it decides nothing. All of that comes from one call in the user's code, which tells it from a decision
        such as `range(n)`.
        """
        call, before = _call(), node.prev
        # Types and devices among its arguments are asked for in between.
        while before.target is getattr or before.target in (*TOLD, _check_decision):
            earlier = before.prev
            if before.target is _check_decision:
                if before.args[1] != "int" or self._calls.get(before) != call:
                    return
                self.graph.erase_node(before)
            before = earlier


def has_layers(module: nn.Module) -> bool:
    """Say whether a module is a run of equal layers of which a part can be called, as those of `Layers` are.

    Args:
        module: any.

    Example:
        >>> from mlotool.models import ResidualLayers
        >>> has_layers(ResidualLayers(num_layers=4, width=2)), has_layers(nn.Linear(2, 2))
        (True, False)
    """
    has_attributes = all(hasattr(module, name) for name in ("many", "num_layers", "h"))
    return has_attributes and LAYERS in inspect.signature(module.forward).parameters


class _Value(fx.Proxy):
    """A stand-in that answers Python's questions by its value: how long it is, whether it is true, of which type."""

    tracer: _ValueTracer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.tracer.value(self))

    def __getattr__(self, k: str) -> Any:
        value = self.tracer.value(self)
        if not hasattr(value, k):
            raise AttributeError(f"'{type(value).__name__}' object has no attribute '{k}'")
        return _ValueAttribute(self, k)

    def __len__(self) -> int:
        return int(self.tracer.decided(self, len))

    def __int__(self) -> int:
        return int(self.tracer.decided(self, int))

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.tracer.decided(self, float))


class _ValueAttribute(_Value, Attribute):
    """An attribute of a stand-in, or a method, if it is called."""

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        Attribute.__init__(self, root, attr)


def _check_decision(value: Any, kind: str, expected: Any, key: str, place: str) -> None:
    """Refuse a batch for which the forward would take another way than the stages do."""
    kinds: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "len": len}
    answer = kinds[kind](value)
    if answer != expected:
        fault = f"{key}: the forward decides by {kind}(..) at {place}, which is {answer} for this batch"
        advice = "Decide inside a block, or use x.shape[0] in place of len(x)."
        raise RunError(f"{fault} and was {expected} for the first batch, which the stages follow. {advice}")


def _asking() -> FrameType:
    """Return the frame of the code that the tracer runs, behind what torch puts between it and an operation."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    assert frame is not None
    return frame


def _place() -> str:
    """Return the line of the user's code that has asked."""
    frame = _asking()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _call() -> object:
    """Return which call of the user's code is being carried out."""
    frame = _asking()
    return frame.f_code, frame.f_lasti
