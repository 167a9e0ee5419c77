"""Values at masks and indices, and values between pixels, written out."""

from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.nn import functional as F

from mlotool.core.decompositions.lacking import lacking
from mlotool.core.decompositions.precision import SHORT, in_float32
from mlotool.core.decompositions.tasks import is_batched

_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return what torch returns, but of products, of which torch's tangent of the gradient is wrong."""
    if reduce == "prod":
        raise lacking("scatter_reduce of products")
    return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)


def scatter_reduce_in_place(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Put the same in the place of the input."""
    if reduce == "prod":
        raise lacking("scatter_reduce of products")
    return input.scatter_reduce_(dim, index, src, reduce, include_self=include_self)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return x with the first values of `source` where the mask is true."""
    x, mask = torch.broadcast_tensors(x, mask)
    if source.numel() < x.numel() and not is_batched(mask) and int(mask.sum()) > source.numel():
        raise RuntimeError(f"masked_scatter: found {source.numel()} values for {int(mask.sum())} places of the mask")
    if source.numel() == 0:
        return x.clone()
    place = (mask.reshape(-1).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1)[place].view(x.shape), x)


def masked_scatter_in_place(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Put the same in the place of x."""
    return x.copy_(masked_scatter(x.clone(), mask, source))


@in_float32("cpu", "cuda")
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Return pictures at the points of a grid, by the weights of the pixels around each."""
    if input.dim() != 4:
        raise lacking("grid_sampler_3d")
    is_short = input.dtype in SHORT
    given = (input.float(), grid.float()) if is_short else (input, grid)
    found = decompositions.grid_sampler_2d(
        *given, _MODES.index(mode), _PADDINGS.index(padding_mode), bool(align_corners)
    )
    return found.to(input.dtype) if is_short else found


def grid_sample_twice(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the same for double backward, which volumes do not have in older versions of torch."""
    return (grid_sample if input.dim() == 4 else F.grid_sample)(input, grid, *args, **kwargs)
