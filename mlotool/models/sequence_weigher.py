"""A module that weighs texts, or their tokens, by what they say."""

from math import log
from typing import Literal

import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError

# b: batch, t: tokens, w: width of the decoder


class SequenceWeigher(nn.Module):
    """A language model's features and a linear layer: one weight in (0, 1) a text, or a token.

        w_i = sigmoid(<a, mean_t x_it> + c)      or      w_it = sigmoid(<a, x_it> + c)      (`per: token`)

    The linear layer begins with a = 0, so that all weights are the same at first. Its first steps move a, and
    through it later ones move the decoder.

    Args:
        decoder: has `width`, w, and `features(tokens)` -> (b, t, w); a `Decoder`.
        per: `sequence` or `token`. A token's weight knows the tokens up to it.
        initial: the weight that all begin with, strictly between 0 and 1.

    Raises:
        ConfigError: `initial` is outside.

    Source: Kemaev et al. 2025, MixFlow-MG, section 5.2, loss weighting: the meta model has the inner model's
        architecture.

    Example:
        >>> from mlotool.models import Decoder
        >>> SequenceWeigher(Decoder(256))(torch.ones(2, 7, dtype=torch.int64))
        tensor([0.5000, 0.5000], grad_fn=<SigmoidBackward0>)
    """

    def __init__(
        self, decoder: nn.Module, per: Literal["sequence", "token"] = "sequence", initial: float = 0.5
    ) -> None:
        super().__init__()
        if not 0 < initial < 1:
            raise ConfigError(f"SequenceWeigher: initial={initial}; expected 0 < initial < 1. Set initial=0.5.")
        if per not in ("sequence", "token"):
            raise ConfigError(f"SequenceWeigher: per={per}; expected sequence or token. Set per=sequence.")
        self.decoder = decoder
        self.per = per
        width = decoder.width
        assert isinstance(width, int)
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.output.bias, log(initial / (1 - initial)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return weights, (b,) a text or (b, t) a token, of token ids (b, t)."""
        features = self.decoder.features(tokens)  # type: ignore[operator]
        if self.per == "sequence":
            features = features.mean(dim=1)
        return torch.sigmoid(self.output(features).squeeze(-1))
