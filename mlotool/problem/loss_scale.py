"""Loss scaling: small gradients of an fp16 backward pass are kept from underflow."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import values_of

SMALLEST = 2.0**-24
"""Of the factors: a gradient that is not finite with this one is no overflow of fp16."""


class LossScale:
    """The factor of one problem's loss, as large as its gradients stay finite (as `torch.amp.GradScaler`).

    Each problem has its own: an overflow in one does not touch the gradients of another. A hypergradient's pullback
    sees cotangents without the factor.

    Args:
        value: the first factor.
        growth_interval: finite steps in a row after which it doubles.

    Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2.

    Example:
        >>> scale = LossScale(8.0)
        >>> scale.accepts([torch.tensor([float("inf")])]), scale.value
        (False, 4.0)
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value = value
        self._growth_interval = growth_interval
        self._num_finite = 0

    def unscaled(self, gradient: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradient of the loss from that of the scaled one."""
        return [None if tensor is None else tensor / self.value for tensor in gradient]

    def accepts(self, gradient: Sequence[Tensor | None]) -> bool:
        """Say whether a gradient is finite, and adapt the factor: to a half if it is not.

        One that is not finite with the smallest factor either is accepted: else a NaN would end all steps unnoticed.

        Cost: a transfer from the device.
        """
        norms = torch._foreach_norm([values_of(tensor) for tensor in gradient if tensor is not None], float("inf"))
        is_finite = not norms or bool(torch.stack(list(norms)).isfinite().all())
        if not is_finite and self.value > SMALLEST:
            self.value, self._num_finite = self.value / 2, 0
            return False
        self._num_finite += 1
        if self._num_finite == self._growth_interval:
            self.value, self._num_finite = self.value * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the count."""
        return {"value": self.value, "num_finite": self._num_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self.value, self._num_finite = state["value"], state["num_finite"]


class ScaledCotangent(torch.autograd.Function):
    """The identity, whose backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Hand the tensors on."""
        ctx.factor = factor
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply."""
        return (None, *(tensor * ctx.factor for tensor in cotangent))
