"""Positive numbers that are learned: rates, decays."""

from math import log

import torch
from torch import Tensor, nn

from mlotool.core.settings import Count, Positive, target


@target("module")
class PositiveVector(nn.Module):
    """Numbers that stay positive: learning rates (one, or one a parameter of a problem) or weight decays.

        value = exp(logarithm)

    Args:
        size: how many.
        initial: the value that all of them start with, above 0.

    Example:
        >>> PositiveVector(2, initial=0.5)()
        tensor([0.5000, 0.5000], grad_fn=<ExpBackward0>)
    """

    def __init__(self, size: Count = 1, initial: Positive = 0.1) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.full((size,), log(initial)))

    def forward(self) -> Tensor:
        """Return the values (size,)."""
        return self.logarithm.exp()
