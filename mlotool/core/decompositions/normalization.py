"""Group and weight normalization, written out."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps)` by group of channels, then times a weight and plus a bias by channel.

    Args:
        input: (N, C, ...).
    """
    # Layer normalization of one row a group.
    rows = input.reshape(input.shape[0], num_groups, math.prod(input.shape[1:]) // num_groups)
    found = F.layer_norm(rows, rows.shape[2:], eps=eps).reshape(input.shape)
    channels = (1, -1, *[1] * (input.dim() - 2))
    if weight is not None:
        found = found * weight.view(channels)
    return found if bias is None else found + bias.view(channels)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `g v / |v|`, with a norm an index of `dim`; one norm where that is -1."""
    if dim == -1:
        return v * (g / torch.linalg.vector_norm(v))
    others = [each for each in range(v.dim()) if each != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))
