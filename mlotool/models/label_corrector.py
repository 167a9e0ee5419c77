"""A module that corrects labels: from what a classifier sees in a sample, and the label that it was given."""

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.settings import Between0And1, Count, target

# b: batch, d: features, k: classes


@target("module")
class LabelCorrector(nn.Module):
    """A prediction of its own, mixed with the given label as far as that is trusted.

        q = softmax(A h + a),   t = sigmoid(W_2 relu(W_1 [h, onehot(y)] + b_1) + b_2)
        corrected = t onehot(y) + (1 - t) q

    Args:
        num_features: d, of the classifier's features h.
        num_classes: k.
        hidden: width of the hidden layer that decides on trust.
        initial_trust: about where t starts, strictly between 0 and 1.

    Raises:
        ConfigError: `initial_trust` is not between 0 and 1.

    Source: Choe et al. 2023, Betty (arXiv 2207.02849), section 5.2 and appendix C.2.

    Example:
        >>> corrected = LabelCorrector(8, 3)(torch.zeros(5, 8), torch.tensor([0, 1, 2, 0, 1]))
        >>> corrected.shape, bool(torch.allclose(corrected.sum(dim=1), torch.ones(5)))
        (torch.Size([5, 3]), True)
    """

    def __init__(
        self, num_features: Count, num_classes: Count, hidden: Count = 100, initial_trust: Between0And1 = 0.5
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.label = nn.Linear(num_features, num_classes)
        self.trust_hidden = nn.Linear(num_features + num_classes, hidden)
        self.trust_output = nn.Linear(hidden, 1)
        nn.init.constant_(self.trust_output.bias, log(initial_trust / (1 - initial_trust)))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        """Return corrected labels (b, k), each of sum 1, of features (b, d) and given labels (b,)."""
        trust = self.trust(features, target)[:, None]
        given = F.one_hot(target, self.num_classes).to(features.dtype)
        return trust * given + (1 - trust) * torch.softmax(self.predict(features), dim=1)

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits (b, k) of q, which the given label has no part in."""
        return self.label(features)

    def trust(self, features: Tensor, target: Tensor) -> Tensor:
        """Return t (b,), the share of the given label."""
        given = F.one_hot(target, self.num_classes).to(features.dtype)
        hidden = torch.relu(self.trust_hidden(torch.cat([features, given], dim=1)))
        return torch.sigmoid(self.trust_output(hidden)).squeeze(1)
