"""The shares of a mixture, which are learned."""

import torch
from torch import Tensor, nn

from mlotool.core.settings import Count, target

# d: parts of the mixture


@target("module")
class MixtureWeights(nn.Module):
    """Positive numbers that add up to 1: the shares of the domains that a model is trained on.

        share = softmax(logits)

    All shares are the same at first.

    Args:
        size: d, how many.

    Example:
        >>> MixtureWeights(4)()
        tensor([0.2500, 0.2500, 0.2500, 0.2500], grad_fn=<SoftmaxBackward0>)
    """

    def __init__(self, size: Count) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        """Return the shares (d,)."""
        return self.logits.softmax(dim=0)
