"""Modules of upper problems: they weigh, correct or perturb samples, or are a vector of numbers.

A class's `neutral` is the value at which a control run (`baseline=fixed`) holds its outputs.
"""

from collections.abc import Sequence
from math import log
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import BelowOne, Between0And1, Count, NonNegative, Positive, Shape, target

# b: batch


@target("module")
class WeightNet(nn.Module):
    """The Meta-Weight-Net: a network with one hidden layer that maps a sample's loss to a weight in (0, 1).

        w = sigmoid(W_2 relu(W_1 l + b_1) + b_2)

    Args:
        hidden: width of the hidden layer.

    Source: Shu et al. 2019, Meta-Weight-Net, section 2.1.

    Example:
        >>> WeightNet()(torch.ones(5, 1)).shape
        torch.Size([5, 1])
    """

    neutral = 1.0

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
        num_samples: number of samples of the split, or more.
        initial: initial value of all weights, strictly between 0 and 1.

    Source: Franceschi et al. 2017, Forward and Reverse Gradient-Based Hyperparameter Optimization, section 5.1.

    Example:
        >>> SampleWeights(3, initial=0.5)(torch.tensor([2, 0]))
        tensor([0.5000, 0.5000], grad_fn=<SigmoidBackward0>)
    """

    neutral = 1.0

    def __init__(self, num_samples: Count, initial: Between0And1 = 0.5) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.full((num_samples,), log(initial / (1 - initial))))

    def forward(self, index: Tensor) -> Tensor:
        """Return weights (b,) of the samples at `index` (b,)."""
        return torch.sigmoid(self.logits[index])


@target("module")
class PositiveVector(nn.Module):
    """A learned vector of positive numbers, such as learning rates or weight decays (one, or one per parameter).

        value = exp(logarithm)

    Args:
        size: how many numbers.
        initial: initial value of all numbers, above 0.

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
    """Learned positive numbers that add up to 1, such as the shares of the domains that a model is trained on.

        share = softmax(logits)

    All shares are equal at first.

    Args:
        size: d, the number of shares.

    Attributes:
        names: names of the parts, for logs and reports; in a recipe, None stands for the names of the data's domains.

    Example:
        >>> MixtureWeights(4)()
        tensor([0.2500, 0.2500, 0.2500, 0.2500], grad_fn=<SoftmaxBackward0>)
    """

    def __init__(self, size: Count) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(size))
        self.names: Sequence[str] | None = None

    def forward(self) -> Tensor:
        """Return the shares (d,)."""
        return self.logits.softmax(dim=0)

    def neutral(self) -> Tensor:
        """Return equal shares (d,)."""
        return torch.full_like(self.logits, 1 / len(self.logits))


# b: batch, t: tokens, w: width of the decoder


@target("module")
class SequenceWeigher(nn.Module):
    """A language model with a linear layer on its features: one weight in (0, 1) per text, or per token.

        w_i = m + (1 - m) sigmoid(<a, mean_t x_it> + c)
        w_it = m + (1 - m) sigmoid(<a, x_it> + c)      (`per: token`)

    The linear layer begins with a = 0, so that all weights are equal at first. The first steps change only the linear
    layer; once a is not 0, gradients reach the decoder too.

    If a loss divides the weights by their sum, only their ratios matter. With m = 0 the ratios have no bound: all
    weights tend to 0, where the sigmoid is like an exponential, and a few texts come to outweigh all others. With m >
    0, no text counts more than 1 / m times another, and the weights of all helpful texts approach 1.

    Args:
        decoder: a module with `width`, w, and `features(tokens)` -> (b, t, w), such as a `Decoder`; also with `losses`,
            if a loss calls them.
        per: `sequence` or `token`. The weight of a token depends on the tokens up to it.
        initial: initial value of all weights, strictly between `smallest` and 1.
        smallest: m, the lower bound of the weights, at least 0.

    Raises:
        ConfigError: `initial` or `smallest` is out of range.

    Source: Kemaev et al. 2025, MixFlow-MG, section 5.2, loss weighting: the meta model has the inner model's
        architecture.

    Example:
        >>> from mlotool.models import Decoder
        >>> SequenceWeigher(Decoder(256))(torch.ones(2, 7, dtype=torch.int64)).detach()
        tensor([0.5000, 0.5000])
    """

    neutral = 1.0

    def __init__(
        self,
        decoder: nn.Module,
        per: Literal["sequence", "token"] = "sequence",
        initial: Between0And1 = 0.5,
        smallest: BelowOne = 0.0,
    ) -> None:
        super().__init__()
        require(initial > smallest, "initial", initial, f"a number above smallest={smallest:g}")
        self.decoder = decoder
        self.per, self.smallest = per, smallest
        width = decoder.width
        assert isinstance(width, int)
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.output.bias, log((initial - smallest) / (1 - initial)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return weights, (b,) per text or (b, t) per token, for token ids (b, t)."""
        features = self.decoder.features(tokens)  # type: ignore[operator]
        if self.per == "sequence":
            features = features.mean(dim=1)
        return self.smallest + (1 - self.smallest) * torch.sigmoid(self.output(features).squeeze(-1))

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
        """Return the cross-entropy (b, t) of the decoder as a language model; arguments as for `Decoder.losses`."""
        losses = self.decoder.losses(tokens, targets, chunk)  # type: ignore[operator]
        assert isinstance(losses, Tensor)
        return losses


# b: batch, n: samples that have a perturbation


@target("module")
class BoundedPerturbation(nn.Module):
    """One additive perturbation for each of the first samples of a split, with entries between -radius and radius.

        d_i = radius tanh(raw_i) for i < n,   0 for the others

    Args:
        image_shape: shape of one sample.
        num_samples: n; the samples with an index below n are perturbed.
        radius: the largest absolute value of an entry, in units of the normalized input.
        start: initial values. `zero`; or `random`: each entry about radius or -radius, for comparison with learned
            perturbations.

    Raises:
        ConfigError: `radius` is negative, or `start` unknown.

    Source: Huang et al. 2020, MetaPoison (arXiv 2004.00225), section 2.2, where entries are clipped, not bounded by
    tanh.

    Example:
        >>> BoundedPerturbation([1, 2, 2], num_samples=3, radius=0.5)(torch.tensor([2, 7])).shape
        torch.Size([2, 1, 2, 2])
    """

    neutral = 0.0

    def __init__(
        self, image_shape: Shape, num_samples: Count, radius: NonNegative, start: Literal["zero", "random"] = "zero"
    ) -> None:
        super().__init__()
        self.radius = radius
        shape = (num_samples, *image_shape)
        # tanh(3) = 0.995
        initial = torch.zeros(shape) if start == "zero" else 3.0 * torch.randn(shape).sign()
        self.raw = nn.Parameter(initial)

    def forward(self, index: Tensor) -> Tensor:
        """Return perturbations (b, *image_shape) of the samples at `index` (b,)."""
        has_one = index < len(self.raw)
        raw = self.raw[torch.where(has_one, index, 0)]
        return self.radius * torch.tanh(raw) * has_one.reshape(-1, *[1] * (raw.dim() - 1))


# b: batch, d: features, k: classes


@target("module")
class LabelCorrector(nn.Module):
    """Corrects labels: mixes the given label with a prediction, by a learned trust t in the given label.

        q = softmax(A h + a),   t = sigmoid(W_2 relu(W_1 [h, onehot(y)] + b_1) + b_2)
        corrected = t onehot(y) + (1 - t) q

    Args:
        num_features: d, of the classifier's features h.
        num_classes: k.
        hidden: width of the hidden layer that decides on trust.
        initial_trust: approximate initial value of t, strictly between 0 and 1.

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
        """Return corrected labels (b, k), which add up to 1, for features (b, d) and given labels (b,)."""
        trust = self.trust(features, target)[:, None]
        given = F.one_hot(target, self.num_classes).to(features.dtype)
        return trust * given + (1 - trust) * torch.softmax(self.predict(features), dim=1)

    def neutral(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the given labels (b, k) as they are."""
        return F.one_hot(target, self.num_classes).to(features.dtype)

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits (b, k) of q, which do not depend on the given label."""
        return self.label(features)

    def trust(self, features: Tensor, target: Tensor) -> Tensor:
        """Return t (b,), the share of the given label."""
        given = F.one_hot(target, self.num_classes).to(features.dtype)
        hidden = torch.relu(self.trust_hidden(torch.cat([features, given], dim=1)))
        return torch.sigmoid(self.trust_output(hidden)).squeeze(1)
