"""A transformer of standard layers that every version of the engine can differentiate twice."""

import math

import torch
from torch import Tensor, nn

from benchmarks.mixflow.setting import Sizes

# b: batch, t: tokens, w: width, h: heads, k: width of a head


class Block(nn.Module):
    """Pre-norm attention and feedforward; attention is written out, as the fused kernel has no second derivative."""

    def __init__(self, width: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (b, t, w)."""
        size = x.shape[-1] // self.num_heads
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, size))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = (query @ key.transpose(-1, -2) / math.sqrt(size)).softmax(-1) @ value
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        found: Tensor = x + self.feedforward(self.feedforward_norm(x))
        return found


class Transformer(nn.Module):
    """Embeddings of tokens and places, blocks, and a head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = 4 * sizes.width if sizes.hidden is None else sizes.hidden
        self.embedding = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.places = nn.Parameter(0.1 * torch.randn(sizes.length, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes.width, hidden, sizes.num_heads) for _ in range(sizes.num_layers))
        self.head = nn.Linear(sizes.width, sizes.vocabulary_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, t, v) of token ids (b, t)."""
        x = self.embedding(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found
