"""Dropout that draws in forward mode what it draws without."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core.decompositions.tasks import is_batched


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return `input` times a random mask of zeros and `1 / (1 - p)`.

    Within `torch.func` torch draws the mask as for a contiguous tensor, and elsewhere in the order of memory: of a
    transposed tensor other entries are dropped. On a GPU it takes an operator there that has no tangents.
    """
    is_random = training and 0.0 < p < 1.0 and input.numel() > 0
    if not is_random or is_batched(input) or input.device.type not in ("cpu", "cuda"):
        return F.dropout(input, p, training, inplace)
    if input.is_cuda:
        # The kernel of a training step, whose mask is drawn with the strides of the tensor.
        mask = torch.native_dropout(torch.ones_like(input), p, True)[1].to(input.dtype) / (1.0 - p)
    else:
        mask = torch.empty_like(input).bernoulli_(1.0 - p).div_(1.0 - p)
    return input.mul_(mask) if inplace else input * mask


def dropout_by_name(input: Tensor, p: float, train: bool) -> Tensor:
    """Return the same."""
    return dropout(input, p, train)


def dropout_in_place(input: Tensor, p: float, train: bool) -> Tensor:
    """Put the same in the place of `input`."""
    return dropout(input, p, train, True)
