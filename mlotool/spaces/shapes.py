"""The shapes in a graph: each node is called on random numbers; what it returns is kept without its values."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Required, TypedDict

import torch
from annotated_types import Ge, Lt
from torch import Size, Tensor, fx, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.private import DataDependentOutputException, DynamicOutputShapeException, pytree
from mlotool.core.settings import fits
from mlotool.spaces.tracing import carried_out, kept_attributes, node_id

BATCH_SIZE = 2
MAX_VALUES = 10**8
# Keys of `node.meta`: a stand-in for its result; the nodes whose results its call changes in place; which operands it
# stretches, where the model has it so; what the stand-in was computed from.
VALUE, CHANGED, STRETCHED, GIVEN = "value", "changed", "stretched", "given"

_BROADCASTING = {
    *(operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.truediv),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum),
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"),
}


class Shapes:
    """Stands in for the values of a graph's nodes.

    Args:
        inputs: as in `Space`: one shape without the batch, or a list of shapes or of {shape, dtype}.

    Raises:
        ConfigError: they are none.

    Attributes:
        is_without_values: whether models are being built without values: on `meta`, or in a FakeTensorMode.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        is_one = bool(inputs) and all(type(size) is int for size in inputs)
        self._inputs = [_shape_and_type(argument) for argument in ([inputs] if is_one else inputs)]
        ambient = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self.is_without_values = torch.empty(0).device.type == "meta" or ambient is not None
        self._device = None if self.is_without_values else "meta"

    def __len__(self) -> int:
        return len(self._inputs)

    def random(self, device: torch.device) -> list[Tensor]:
        """Return inputs with random values: normal ones, or zeros and ones."""
        return [
            torch.randn(shape, dtype=dtype, device=device)
            if dtype.is_floating_point
            else torch.randint(2, shape, device=device).to(dtype)
            for shape, dtype in self._inputs
        ]

    def infer(self, graph: fx.Graph, root: nn.Module, *, is_base: bool = False) -> None:
        """Compute the shapes of all nodes of a graph.

        Args:
            graph: its nodes get a stand-in of their value each.
            root: the model, in evaluation mode.
            is_base: whether it is the model as it was given: what it stretches it may go on stretching.

        Raises:
            InfeasibleModelError: an operation does not take what it is given, or stretches it.
        """
        inputs = iter(self._inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                shape, dtype = next(inputs)
                node.meta[VALUE] = torch.empty(shape, dtype=dtype, device=self._device)
            else:
                self.infer_node(node, root, is_base=is_base)

    def infer_node(self, node: fx.Node, root: nn.Module, *, is_base: bool = False) -> None:
        """Compute the shape of one node, whose inputs have theirs."""
        stand_ins = {source: source.meta[VALUE] for source in node.all_input_nodes}
        args = fx.node.map_arg(node.args, stand_ins.__getitem__)
        if node.op == "output":
            node.meta[VALUE] = args[0]
        # Mutators change a few nodes.
        if node.op == "output" or (node.op != "get_attr" and self.is_computed(node, root)):
            return
        device = next(root.parameters(), torch.empty(0)).device
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                values = {source: self._drawn(value, device) for source, value in stand_ins.items()}
                result, changed = _called(node, root, values)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                fault = f"node '{node_id(node)}' takes steps that depend on values of tensors"
                raise ConfigError(f"{fault}, while only shapes are computed. Build the model with values.") from error
            except Exception as error:
                raise _unfit(node, stand_ins, error) from error
        stretched = _stretched(node, args)
        if is_base:
            node.meta[STRETCHED] = stretched
        if any(stretched) and node.meta.get(STRETCHED) != stretched:
            shapes = " and ".join(described(argument) for argument in args if isinstance(argument, Tensor))
            raise InfeasibleModelError(
                f"node '{node_id(node)}' is given {shapes}, one of which torch would broadcast; expected equal shapes, "
                "as the base has them there. Correct the candidate whose result this is."
            )
        if not self.is_without_values:
            result = pytree.tree_map_only(Tensor, lambda value: torch.empty_like(value, device="meta"), result)
        node.meta |= {VALUE: result, CHANGED: changed, GIVEN: _given(node, root)}

    def is_computed(self, node: fx.Node, root: nn.Module) -> bool:
        """Say whether a node's shape is that of what it calls and is given now."""
        return GIVEN in node.meta and bool(node.meta[GIVEN] == _given(node, root))

    def _drawn(self, stand_in: Any, device: torch.device) -> Any:
        """Return numbers between 0 and 1 like a stand-in, or zeros and ones; the stand-in where nothing has values."""
        if self.is_without_values:
            return stand_in
        return pytree.tree_map_only(Tensor, lambda value: _random_like(value, device), stand_in)


def _called(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> tuple[Any, list[fx.Node]]:
    def versions(value: Any) -> list[int]:
        return [tensor._version for tensor in pytree.tree_leaves(value) if isinstance(tensor, Tensor)]

    # What a buffer keeps from call to call may change.
    before = {source: versions(value) for source, value in values.items() if source.op != "get_attr"}
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    with kept_attributes(root.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()):
        result = carried_out(node.op, node.target, root, args, kwargs)
    return result, [source for source, old in before.items() if versions(values[source]) != old]


def shape_of(node: fx.Node) -> Size | None:
    """Return the shape of what a node returns, without the batch; None where that is no tensor or not known."""
    value = node.meta.get(VALUE)
    return value.shape[1:] if isinstance(value, Tensor) and value.dim() else None


def described(value: Tensor) -> str:
    """Return a shape with b for the batch."""
    rest = "".join(f", {size}" for size in value.shape[1:])
    return f"(b{rest})" if value.shape[:1] == (BATCH_SIZE,) else str(tuple(value.shape))


def shapes_of_result(graph: fx.Graph) -> str:
    """Return the shapes of what a model returns, in words, and the type of its numbers where it is no usual one."""

    def with_type(value: Tensor) -> str:
        is_usual = value.dtype == torch.get_default_dtype()
        return described(value) if is_usual else f"{described(value)} of {str(value.dtype).removeprefix('torch.')}"

    [output] = (node for node in graph.nodes if node.op == "output")
    return str(pytree.tree_map_only(Tensor, with_type, output.meta.get(VALUE)))


def _unfit(node: fx.Node, values: Mapping[fx.Node, Any], error: Exception) -> InfeasibleModelError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    shapes = ", ".join(described(value) for value in values.values() if isinstance(value, Tensor))
    fault = f"does not accept its input ({shapes}): {reason}"
    if node.op == "get_attr":
        fault = f"reads a tensor that is not there any more ({reason}), as the new module has no tensor of that name"
    return InfeasibleModelError(f"node '{node_id(node)}' {fault}. Correct the candidate, or the module before it.")


def _stretched(node: fx.Node, args: tuple[Any, ...]) -> tuple[bool, ...]:
    """Return which operands of an elementwise operation are smaller than its result."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if node.target not in _BROADCASTING or len(tensors) < 2:
        return ()
    size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(tensor.shape != size for tensor in tensors)


def _given(node: fx.Node, root: nn.Module) -> tuple[Any, ...]:
    """Return what the shape of a node's result depends on: what it calls, and the shapes that it is given."""

    def shapes(source: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), source.meta[VALUE])

    called = root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    return node.op, called, fx.node.map_arg((node.args, dict(node.kwargs)), shapes)


def _random_like(value: Tensor, device: torch.device) -> Tensor:
    drawn = torch.empty_like(value, device=device)
    return drawn.uniform_() if value.is_floating_point() else drawn.copy_(torch.randint(2, value.shape, device=device))


class _Input(TypedDict, total=False):
    """An input in a recipe."""

    shape: Required[Sequence[Annotated[int, Ge(1), Lt(2**31)]]]
    dtype: Literal["float32", "float64", "int64", "bool"]
    batched: bool


def _shape_and_type(described: Any) -> tuple[tuple[int, ...], torch.dtype]:
    settings: Any = described if isinstance(described, Mapping) else {"shape": described}
    expected = (
        "the shape of an input without the batch, such as [3, 32, 32], or {shape: [64], dtype: int64} with one of "
        "float32, float64, int64, bool, and batched: false for an argument without a batch"
    )
    require(fits(settings, _Input), "inputs", described, expected, "Write inputs: ${data.image_shape}.")
    shape = tuple(settings["shape"])
    expected = f"at most {MAX_VALUES:.0e} values, as a space is compared with its base on random ones"
    advice = "Write the shape of one input, without the batch."
    require(math.prod(shape) <= MAX_VALUES, "inputs", described, expected, advice)
    dtype = getattr(torch, settings["dtype"]) if "dtype" in settings else torch.get_default_dtype()
    return ((BATCH_SIZE, *shape) if settings.get("batched", True) else shape), dtype
