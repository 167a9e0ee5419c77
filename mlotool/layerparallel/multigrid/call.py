"""What blocks are given beside the state: masks, a condition, the states of an encoder."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class CallArguments:
    """The arguments of a block beside its state, the same for all blocks; those with a gradient can be replaced.

    Args:
        args: by position, behind the state.
        kwargs: by name.

    Attributes:
        tensors: those that require a gradient, each once a place.

    Example:
        >>> condition = torch.ones(2, requires_grad=True)
        >>> arguments = CallArguments((condition,), {"is_causal": True})
        >>> len(arguments.tensors), arguments.filled([torch.zeros(2)])
        (1, ((tensor([0., 0.]),), {'is_causal': True}))
    """

    def __init__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self._leaves, self._structure = tree_flatten((tuple(args), dict(kwargs or {})))
        self._places = [
            place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.tensors: list[Tensor] = [self._leaves[place] for place in self._places]

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self._leaves)

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by position and by name, with other tensors in the places of `tensors`."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs

    def constants(self) -> list[Tensor]:
        """Return the tensors without a gradient."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and not leaf.requires_grad]

    def equals(self, other: "CallArguments") -> bool:
        """Say whether two calls were given the same: tensors with a gradient are compared by identity."""
        return self._structure == other._structure and all(map(_is_same, self._leaves, other._leaves))


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # of arrays
        return bool(np.array_equal(one, other))


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return not isinstance(one, Tensor) and not isinstance(other, Tensor) and _is_equal(one, other)
    if one.requires_grad or other.requires_grad or one.dtype != other.dtype or one.device != other.device:
        return False
    # A part of a mask that is cut out anew for each block.
    return torch.equal(one, other)
