"""Detached tensors in the memory of a problem's parameters, made once and not in each evaluation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlotool.core.tracing import is_tracing


class ParameterViews:
    """The parameters of a problem as constants, and as leaves of another problem's loss.

    A view takes a microsecond to make, and a cycle of two small networks asks for thirty, which is 3 % of it. Steps in
    place show through a view. Where a parameter has got other memory, as by `module.to`, the views are made anew.

    Args:
        parameters: the problem's, in order.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> views = ParameterViews([weight])
        >>> [constant], [leaf] = views.constants(), views.leaves(views.constants())
        >>> with torch.no_grad():
        ...     _ = weight.add_(1.0)
        >>> constant, leaf, views.constants()[0] is constant
        (tensor([2.]), tensor([2.], requires_grad=True), True)
    """

    __slots__ = ("_constants", "_is_kept", "_leaves", "_parameters", "_places")

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        # Tensors of other types may have no address: parts of a divided parameter, or one that has no shape yet.
        self._is_kept = all(type(each) is nn.Parameter for each in parameters)
        self._places: list[int] = []
        self._constants: tuple[Tensor, ...] = ()
        self._leaves: tuple[Tensor, ...] = ()

    def constants(self) -> tuple[Tensor, ...]:
        """Return the parameters, detached; nobody may change what these tensors require."""
        # A view keeps its memory alive, so that no other memory has its address.
        places = [each.data_ptr() for each in self._parameters] if self._is_kept else []
        if places and places == self._places:
            return self._constants
        # A mode that watches what a loss calls must not take these for calls of the loss.
        with torch._C.DisableTorchFunction():
            constants = tuple([each.detach() for each in self._parameters])
            # Empty parameters and those of the device 'meta' all have the address 0.
            if all(places) and places and _is_ordinary():
                self._places, self._constants = places, constants
                self._leaves = tuple([each.detach().requires_grad_() for each in self._parameters])
        return constants

    def leaves(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors that require a gradient in the memory of others.

        Args:
            tensors: what `constants` has returned, whose leaves are kept, or any others.
        """
        if tensors is self._constants:
            return self._leaves
        return [each.detach().requires_grad_() for each in tensors]


def _is_ordinary() -> bool:
    """Return whether a tensor that is made now can be used at any other time."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not (is_transformed or is_tracing() or torch.is_inference_mode_enabled())
