"""Softmax over fewer classes than a CPU's vector registers hold, which torch computes one number at a time.

Along the first dimension it computes as many rows at once as registers hold numbers: 3,200 rows of ten classes take an
eighth of the time, copies included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_VECTOR_BYTES = 64
_FEWEST = 4096
"""Numbers: below, the copies take what is saved."""


def _is_narrow(x: Tensor, dim: int) -> bool:
    is_last = x.dim() > 1 and dim % x.dim() == x.dim() - 1
    is_plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return is_last and is_plain and x.numel() >= _FEWEST and x.shape[-1] * x.element_size() < _VECTOR_BYTES


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous()


def _last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous()


def _forward(operation: Any) -> Callable[..., Any]:
    def forward(x: Tensor, dim: int, half_to_float: bool) -> Any:
        if half_to_float or not _is_narrow(x, dim):
            return NotImplemented
        return _last(operation(_first(x), 0, False))

    return forward


def _backward(operation: Any) -> Callable[..., Any]:
    def backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
        if dtype != gradient.dtype or not _is_narrow(gradient, dim):
            return NotImplemented
        return _last(operation(_first(gradient), _first(output), 0, dtype))

    return backward


NARROW_SOFTMAX: dict[Any, Callable[..., Any]] = {
    **{each: _forward(each) for each in (_ATEN._softmax.default, _ATEN._log_softmax.default)},
    **{
        each: _backward(each)
        for each in (_ATEN._softmax_backward_data.default, _ATEN._log_softmax_backward_data.default)
    },
}
"""A table for `make_fx`."""
