"""A module that weighs texts, or their tokens, by what they say."""

from math import log
from typing import Literal

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import BelowOne, Between0And1, target

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
