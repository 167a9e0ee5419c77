"""Distances between rows, written out."""

import torch
from torch import Tensor

from mlotool.core.decompositions.precision import in_float32

_MOST_ROWS = 25
"""Above this, torch takes matrix products for Euclidean distances."""


@in_float32("cpu", "cuda")
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """Return `|x_i - y_j|_p`.

    Args:
        x1: (..., P, M).
        x2: (..., R, M).
        p: of the norm.
        compute_mode: as torch takes it. With matrix products the memory is P R; else P R M.
    """
    many = max(x1.shape[-2], x2.shape[-2]) > _MOST_ROWS
    if p == 2.0 and (compute_mode == "use_mm_for_euclid_dist" or (many and compute_mode.endswith("necessary"))):
        squares = x1.square().sum(-1)[..., :, None] + x2.square().sum(-1)[..., None, :]
        return _root(squares - 2.0 * (x1 @ x2.mT))
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


@in_float32("cpu", "cuda")
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Return `|x_i - x_j|_p` for i < j."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norm(input[first] - input[second], p)


def _norm(difference: Tensor, p: float) -> Tensor:
    """Return norms along the last axis, of derivative zero at zero."""
    if p == 2.0:
        return _root(difference.square().sum(-1))
    if p == float("inf"):
        return _largest(difference)
    if p < 2.0 and p not in (0.0, 1.0):
        return _power(_power(difference.abs(), p).sum(-1), 1.0 / p)
    return torch.linalg.vector_norm(difference, p, dim=-1)


def _largest(difference: Tensor) -> Tensor:
    """Return the largest size along the last axis; where several are, each has the whole slope, as torch has it."""
    if difference.shape[-1] == 0:
        return difference.sum(-1)
    sizes = difference.abs()
    largest = sizes.detach().amax(-1, keepdim=True)
    return torch.where(sizes == largest, sizes - largest, 0.0).sum(-1) + largest.squeeze(-1)


def _power(sizes: Tensor, p: float) -> Tensor:
    """Return `sizes^p`, of derivative zero at zero, where a slope is infinite."""
    is_positive = sizes > 0
    return torch.where(is_positive, torch.where(is_positive, sizes, 1.0) ** p, 0.0)


def _root(squares: Tensor) -> Tensor:
    # Zero times an infinite slope would be NaN.
    is_positive = squares > 0
    return torch.where(is_positive, torch.where(is_positive, squares, 1.0).sqrt(), 0.0)
