"""New modules as nodes of a graph: they change nothing that other nodes may read, and have the type of their place."""

from collections.abc import Iterable

import torch
from torch import Tensor, fx, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.in_place import changed_operands
from mlotool.spaces.node_calls import is_of_torch
from mlotool.spaces.shapes import VALUE
from mlotool.spaces.targets import node_id


def fitted(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a new module, whose layers of torch's change nothing in place.

    Args:
        module: that a candidate has made.
        dtype: of its parameters and buffers, where it is not the usual one; None: what they have.
    """
    for each in module.modules():
        if is_of_torch(each) and getattr(each, "inplace", None) is True:
            each.inplace = False  # type: ignore[assignment]
    return module if dtype in (None, torch.get_default_dtype()) else module.to(dtype)


def dtype_at(nodes: Iterable[fx.Node]) -> torch.dtype | None:
    """Return the type of the first of some nodes' results that is one of floating point numbers."""
    values = (node.meta.get(VALUE) for node in nodes)
    return next((each.dtype for each in values if isinstance(each, Tensor) and each.is_floating_point()), None)


def check_changes_nothing(node: fx.Node) -> None:
    """Refuse a new module that changes what it is given.

    Raises:
        InfeasibleModelError: with its node.
    """
    changed = changed_operands(node)
    if changed:
        raise InfeasibleModelError(
            f"node '{node_id(node)}' changes in place what '{node_id(changed[0])}' returns, which other nodes may "
            "read; expected a module that returns a new tensor, as x.relu() does. Correct the candidate."
        )
