"""Sizes, types and devices that a forward asks of a layer's output, told from the module's inputs instead.

A mask that is made for `x.shape[1]` tokens, where x is what an embedding has returned, would have to go on beside x
past every cut. The same number is a size of the inputs, of which each stage has all.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from mlotool.core.errors import RunError

Create = Callable[..., fx.Node]
"""Records an operation: kind, target, arguments by position, arguments by name."""


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
    found = _of_an_input(node, value, values, create)
    if found is None:
        found = create("call_function", _constant, (value,), {})
    create("call_function", _check_same, (node, found, key, place), {})
    return found


def _asked(node: fx.Node) -> fx.Node | None:
    """Return the node whose size, type or device a node is."""
    args = node.args
    if not args or not isinstance(args[0], fx.Node):
        return None
    if node.op == "call_method":
        is_size = node.target == "size" and len(args) == 2
        return args[0] if is_size or node.target == "dim" else None
    if node.target is getattr:
        return args[0] if args[1] in ("device", "dtype", "ndim") else None
    if node.target is operator.getitem and isinstance(args[1], int) and _is_shape(args[0]):
        asked = args[0].args[0]
        return asked if isinstance(asked, fx.Node) else None
    return None


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1
    return bool(node.target is getattr and node.args[1] == "shape")


def _of_an_input(node: fx.Node, value: Any, values: Mapping[fx.Node, Any], create: Create) -> fx.Node | None:
    inputs = [each for each in values if each.op == "placeholder" and isinstance(values[each], Tensor)]
    if isinstance(value, torch.device):
        return next((create("call_function", getattr, (each, "device"), {}) for each in inputs), None)
    if not isinstance(value, int) or node.target == "dim" or node.args[1] == "ndim":
        return None
    axis = node.args[1]
    assert isinstance(axis, int)
    fitting = (each for each in inputs if 0 <= axis < values[each].dim() and values[each].shape[axis] == value)
    found = next(fitting, None)
    # Another axis of the same size may be so by chance: a batch of 16 beside a width of 16.
    return None if found is None else create("call_method", "size", (found, axis), {})


def _constant(value: Any) -> Any:
    return value


def _check_same(found: Any, expected: Any, key: str, place: str) -> None:
    """Refuse a batch for which a layer's output has another size than the stages take from the inputs."""
    if found != expected:
        raise RunError(
            f"{key}: the forward asks for a size, type or device at {place}, which is {found} for this batch; the "
            f"stages have taken it from the inputs, where it is {expected}. Expected the relation that the first batch "
            "had. Ask the module's input for it, or pass it on in a tensor."
        )


TOLD = (_constant, _check_same)
"""Operations that `told_by_inputs` adds."""
