"""A small transformer encoder for texts of token ids."""

from typing import Literal

import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.settings import BelowOne, Count, Layers, target
from mlotool.models.text_network import PADDING, attended, mean_of_words

# b: batch, t: tokens, w: width, h: heads, k: classes


@target("module")
class TextTransformer(nn.Module):
    """Embeddings and positions, pre-norm encoder blocks, the mean over tokens or the first one, a linear layer.

        x = E[tokens] + P
        x = x + attention(norm(x)),   x = x + W_2 gelu(W_1 norm(x))      (each block)
        logits = W pool(norm(x))

    Padding (id 0) is not attended to and has no part in the mean.

    Args:
        vocabulary_size: number of token ids.
        length: t, at most.
        num_classes: k.
        width: w, a multiple of `num_heads`.
        num_heads: h.
        num_layers: number of blocks.
        hidden: width inside a block's second half.
        dropout: share of each half's output that is dropped while training.
        pooling: `mean` over the tokens that are no padding, or `first` token (BERT's).

    Raises:
        ConfigError: `width` is not a multiple of `num_heads`.

    Source: Vaswani et al. 2017, Attention Is All You Need; with the norm inside, Xiong et al. 2020, figure 1b.

    Example:
        >>> TextTransformer(100, 40, 2)(torch.ones(3, 40, dtype=torch.int64)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        vocabulary_size: Count,
        length: Count,
        num_classes: Count,
        width: Count = 32,
        num_heads: Count = 4,
        num_layers: Layers = 2,
        hidden: Count = 64,
        dropout: BelowOne = 0.0,
        pooling: Literal["mean", "first"] = "mean",
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ConfigError(
                f"TextTransformer: width={width} and num_heads={num_heads}; expected a width that the heads share "
                f"evenly. Set width={max(1, width // num_heads) * num_heads}."
            )
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.position, std=0.1)
        self.blocks = nn.ModuleList(_Block(width, num_heads, hidden, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        self.pooling = pooling

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, k) of token ids (b, t)."""
        return self.features_and_logits(tokens)[1]

    def features_and_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the last layer reads (b, w), and the logits (b, k)."""
        is_word = tokens != PADDING
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, is_word)
        x = self.norm(x)
        features = x[:, 0] if self.pooling == "first" else mean_of_words(x, is_word)
        return features, self.classifier(features)


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        read = attended(self.query_key_value(self.norm_1(x)), self.num_heads, is_word)
        x = x + self.dropout(self.output(read))
        return x + self.dropout(self.feedforward(self.norm_2(x)))
