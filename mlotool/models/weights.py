"""Modules that weigh samples: as a function of the loss, or one weight for each sample."""

from math import log

import torch
from torch import Tensor, nn

from mlotool.core.settings import Between0And1, Count, Positive, target

# b: batch


@target("module")
class WeightNet(nn.Module):
    """The Meta-Weight-Net: loss -> weight in (0, 1), a 1-hidden-1 network.

        w = sigmoid(W_2 relu(W_1 l + b_1) + b_2)

    Args:
        hidden: width of the hidden layer.

    Source: Shu et al. 2019, Meta-Weight-Net, section 2.1.

    Example:
        >>> WeightNet()(torch.ones(5, 1)).shape
        torch.Size([5, 1])
    """

    def __init__(self, hidden: Count = 100) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, losses: Tensor) -> Tensor:
        """Return weights (b, 1) of losses (b, 1)."""
        return torch.sigmoid(self.output(torch.relu(self.hidden(losses))))


@target("module")
class SampleWeights(nn.Module):
    """One weight in (0, 1) for each sample of a split.

        w_i = sigmoid(logits_i)

    Args:
        num_samples: of the split; more than it has does no harm.
        initial: the weight that all of them start with, strictly between 0 and 1.

    Source: Franceschi et al. 2017, Forward and Reverse Gradient-Based Hyperparameter Optimization, section 5.1.

    Example:
        >>> SampleWeights(3, initial=0.5)(torch.tensor([2, 0]))
        tensor([0.5000, 0.5000], grad_fn=<SigmoidBackward0>)
    """

    def __init__(self, num_samples: Count, initial: Between0And1 = 0.5) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.full((num_samples,), log(initial / (1 - initial))))

    def forward(self, index: Tensor) -> Tensor:
        """Return weights (b,) of the samples at `index` (b,)."""
        return torch.sigmoid(self.logits[index])


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
