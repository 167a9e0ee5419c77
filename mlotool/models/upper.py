"""Modules of upper problems: they weigh, correct or perturb samples, or are a vector of numbers.

`neutral` of a class is what a control (`baseline=fixed`) holds its outputs at.
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
    """The Meta-Weight-Net: loss -> weight in (0, 1), a 1-hidden-1 network.

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
        num_samples: of the split; more than it has does no harm.
        initial: the weight that all of them start with, strictly between 0 and 1.

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

    Attributes:
        names: of the parts, for logs and pages; in a recipe None becomes the domains of its data.

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
    """A language model's features and a linear layer: one weight in (0, 1) a text, or a token.

        w_i = m + (1 - m) sigmoid(<a, mean_t x_it> + c)
        w_it = m + (1 - m) sigmoid(<a, x_it> + c)      (`per: token`)

    The linear layer begins with a = 0, so that all weights are the same at first. Its first steps move a, and
    through it later ones move the decoder.

    Where a loss divides the weights by their sum, only their ratios matter. Those of a sigmoid alone (m = 0) have no
    bound: all weights tend to 0, where the sigmoid is an exponential, and a few texts come to outweigh all others.
    With m > 0 no text counts more than 1 / m of another, and those that help end near 1 together.

    Args:
        decoder: has `width`, w, and `features(tokens)` -> (b, t, w), such as a `Decoder`; and `losses` where those are
            asked for.
        per: `sequence` or `token`. A token's weight knows the tokens up to it.
        initial: the weight that all begin with, strictly between `smallest` and 1.
        smallest: m, the weight that none falls below, at least 0.

    Raises:
        ConfigError: `initial` or `smallest` is outside.

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
        """Return weights, (b,) a text or (b, t) a token, of token ids (b, t)."""
        features = self.decoder.features(tokens)  # type: ignore[operator]
        if self.per == "sequence":
            features = features.mean(dim=1)
        return self.smallest + (1 - self.smallest) * torch.sigmoid(self.output(features).squeeze(-1))

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
        """Return the cross-entropy (b, t) of the decoder itself, as a language model; arguments as for its own."""
        losses = self.decoder.losses(tokens, targets, chunk)  # type: ignore[operator]
        assert isinstance(losses, Tensor)
        return losses


# b: batch, n: samples that have a perturbation


@target("module")
class BoundedPerturbation(nn.Module):
    """One additive perturbation for each of the first samples of a split, none of whose entries leaves +-radius.

        d_i = radius tanh(raw_i) for i < n,   0 for the others

    Args:
        image_shape: shape of one sample.
        num_samples: n; the samples are those with an index below it.
        radius: of the maximum norm, in units of the normalised input.
        start: `zero`; or `random`: each entry about radius or -radius, of full size but not learned.

    Raises:
        ConfigError: `radius` is negative, or `start` unknown.

    Source: Huang et al. 2020, MetaPoison (arXiv 2004.00225), section 2.2, which clips where tanh stays smooth.

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

    def neutral(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the given labels (b, k) as they are."""
        return F.one_hot(target, self.num_classes).to(features.dtype)

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits (b, k) of q, which the given label has no part in."""
        return self.label(features)

    def trust(self, features: Tensor, target: Tensor) -> Tensor:
        """Return t (b,), the share of the given label."""
        given = F.one_hot(target, self.num_classes).to(features.dtype)
        hidden = torch.relu(self.trust_hidden(torch.cat([features, given], dim=1)))
        return torch.sigmoid(self.trust_output(hidden)).squeeze(1)
