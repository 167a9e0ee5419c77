"""Activations, written out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core.decompositions.precision import SHORT, in_float32


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return `x sigmoid(x)`."""
    return _applied(lambda x: x * torch.sigmoid(x), x, inplace)


def mish(x: Tensor, inplace: bool = False) -> Tensor:
    """Return `x tanh(log(1 + exp(x)))`."""
    return _applied(lambda x: x * torch.tanh(F.softplus(x)), x, inplace)


def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """Return `x / 6 + 1/2`, kept between 0 and 1."""
    return _applied(lambda x: F.hardtanh(x + 3.0, 0.0, 6.0) / 6.0, x, inplace)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Return `log(z / (1 - z))`, with z = x kept `eps` away from 0 and 1."""
    z = x if eps is None else x.clamp(eps, 1.0 - eps)
    return torch.log(z / (1.0 - z))


def logit_in_place(x: Tensor, eps: float | None = None) -> Tensor:
    """Put the same in the place of x."""
    return x.copy_(logit(x.clone(), eps))


@in_float32("cuda")
def prod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the product; of all entries by one axis, since torch has no tangent of that gradient at two zeros."""
    return torch.prod(x, *args, **kwargs) if args or "dim" in kwargs else torch.prod(x.reshape(-1), 0, **kwargs)


@in_float32("cuda")
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the products of the first 1, 2, ... entries.

    By doubling: product over the last 2, 4, 8, ... entries. Torch's derivative takes the products without an entry that
    is zero for constants in forward mode.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return torch.cumprod(x, dim, dtype=dtype)
    found = (x if dtype is None else x.to(dtype)).movedim(dim, 0) if x.dim() else x.reshape(1)
    reach = 1
    while reach < len(found):
        found = torch.cat([found[:reach], found[reach:] * found[:-reach]])
        reach *= 2
    return found.movedim(0, dim) if x.dim() else found.reshape(())


def _applied(function: Callable[[Tensor], Tensor], x: Tensor, inplace: bool) -> Tensor:
    # The kernels of torch compute in float32 where the numbers are shorter.
    short = x.dtype in SHORT
    given = x.clone() if inplace and not short else x
    found = function(given.float()).to(x.dtype) if short else function(given)
    return x.copy_(found) if inplace else found
