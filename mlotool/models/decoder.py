"""A decoder-only transformer: a language model that predicts each token from those before it."""

from typing import Literal

from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.models.decoder_layers import CausalAttention, DecoderBlock, Feedforward, RMSNorm
from mlotool.models.token_losses import token_losses

# b: batch, t: tokens, w: width, v: vocabulary, L: blocks


class Decoder(nn.Module):
    """Embeddings, pre-norm blocks of causal attention and a feedforward, a norm, and a head.

        x = E[tokens]
        x = x + attention(norm(x)),   x = x + feedforward(norm(x))      (each block)
        logits = E norm(x)

    Positions are rotations of queries and keys, so a text may have any length. There are no biases. All operations
    have second derivatives, by double backward and by forward mode over reverse mode. `blocks` are modules of one
    class that take and return x (b, t, w).

    Each entry of a matrix begins as normal with variance 1 / inputs, and 1 / (2 L inputs) where a block adds to x: so
    what the 2 L halves add up to, and with it the gradient of each, does not depend on the depth.

    Args:
        vocabulary_size: v, number of token ids; 256 for bytes.
        width: w, of the stream that the blocks add to (d_model).
        hidden: width inside the feedforward (ffw_size).
        num_heads: of each attention (n_heads).
        kv_size: width of one head's queries, keys and values, even; any, or None for `width / num_heads`.
        num_layers: L, number of blocks (n_layers).
        feedforward: `gelu`, as Chinchilla has it, or `swiglu`, with three matrices in the place of two.
        tied: the head is the embedding; else it is a matrix of its own.
        dropout: share of the embeddings and of each half's output that is dropped while training.

    Raises:
        ConfigError: `kv_size` is odd, or None where the heads do not share `width` evenly; `feedforward` is another
            word.

    Source: Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (Chinchilla), with rotary positions
        (Su et al. 2021) as Kemaev et al. 2025, MixFlow-MG, section 5, has it.

    Example:
        >>> import torch
        >>> model, tokens = Decoder(256), torch.ones(3, 40, dtype=torch.int64)
        >>> model(tokens).shape, model.losses(tokens[:, :-1], tokens[:, 1:]).shape
        (torch.Size([3, 40, 256]), torch.Size([3, 39]))
    """

    def __init__(
        self,
        vocabulary_size: int,
        width: int = 64,
        hidden: int = 256,
        num_heads: int = 4,
        kv_size: int | None = None,
        num_layers: int = 2,
        feedforward: Literal["gelu", "swiglu"] = "gelu",
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = width
        kv_size = _even_kv_size(kv_size, width, num_heads)
        if feedforward not in ("gelu", "swiglu"):
            raise ConfigError(f"Decoder: feedforward={feedforward}; expected gelu or swiglu. Set feedforward=gelu.")
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, hidden, num_heads, kv_size, feedforward, dropout) for _ in range(num_layers)
        )
        self.norm = RMSNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        self._initialise(num_layers)

    @property
    def head_weight(self) -> Tensor:
        """The matrix (v, w) that makes logits of features."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, t, v) of token ids (b, t): those at place i are for the token at place i + 1."""
        return self.features(tokens) @ self.head_weight.T

    def features(self, tokens: Tensor) -> Tensor:
        """Return what the head reads (b, t, w) of token ids (b, t)."""
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
        """Return the cross-entropy (b, t), in nats, of each token's prediction, without all logits at once.

        In a loss, `model.method("losses", tokens, targets)`, where `model` is a role.

        Args:
            tokens: ids (b, t).
            targets: ids (b, t) of the tokens that follow.
            chunk: tokens whose logits live at once; None: as many as have 2^22 logits.
        """
        return token_losses(self.features(tokens), self.head_weight, targets, chunk)

    def _initialise(self, num_layers: int) -> None:
        nn.init.normal_(self.embedding.weight, std=self.width**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for module in self.modules():
            if isinstance(module, CausalAttention | Feedforward):
                nn.init.normal_(module.output.weight, std=(2 * num_layers * module.output.in_features) ** -0.5)


def _even_kv_size(kv_size: int | None, width: int, num_heads: int) -> int:
    if kv_size is None and (num_heads < 1 or width % num_heads):
        raise ConfigError(
            f"Decoder: width={width} and num_heads={num_heads}; expected heads that share the width evenly where "
            f"kv_size is null. Set kv_size={2 * max(1, width // max(1, num_heads) // 2)}."
        )
    size = width // num_heads if kv_size is None else kv_size
    if size < 2 or size % 2:
        raise ConfigError(
            f"Decoder: kv_size={size}; expected a positive even number, since rotary positions turn pairs of entries. "
            f"Set kv_size={max(2, size + size % 2)}."
        )
    return size
