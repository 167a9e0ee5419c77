"""Batch normalisations whose schema says that they write into the running statistics.

`native_batch_norm` and cuDNN's write in silence: in a traced graph two equal calls would be taken for one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

_ATEN = torch.ops.aten


def _native(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...]
    if mean is None or variance is None:
        found = _ATEN._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    else:
        found = _ATEN._native_batch_norm_legit.default(x, weight, bias, mean, variance, training, momentum, eps)
    return found


def _cudnn(x: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    # Its fourth output is for its own backward pass, in whose place is the native one's.
    return (*_native(x, weight, *arguments), x.new_zeros(0, dtype=torch.uint8))


HONEST_BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    _ATEN.native_batch_norm.default: _native,
    _ATEN.cudnn_batch_norm.default: _cudnn,
    **get_decompositions([_ATEN.cudnn_batch_norm_backward]),
}
"""A table for `make_fx`."""


def _stackable(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return output, the mean and 1 / standard deviation that backward takes, and the running statistics after it."""
    if not training:
        return (*_ATEN.native_batch_norm(x, weight, bias, mean, variance, False, momentum, eps), mean, variance)
    output, own, scale = _ATEN.native_batch_norm(x, weight, bias, None, None, True, momentum, eps)
    count = x.numel() // x.shape[1]
    unbiased = (scale.square().reciprocal() - eps) * (count / (count - 1))
    return (
        *(output, own, scale),
        torch.lerp(mean, own.to(mean.dtype), momentum),
        torch.lerp(variance, unbiased.to(variance.dtype), momentum),
    )


STACKABLE_BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    _ATEN._native_batch_norm_legit_functional.default: _stackable,
    _ATEN._native_batch_norm_legit.no_stats: lambda x, weight, bias, training, momentum, eps: _ATEN.native_batch_norm(
        x, weight, bias, None, None, training, momentum, eps
    ),
}
"""A table for `make_fx`: pure ones that `torch.vmap` knows, which turns the axis of members into one of channels."""
