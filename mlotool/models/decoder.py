"""A decoder-only transformer: a language model that predicts each token from those before it.

Its layers consist of elementary operations. Torch's fused kernels for attention have no second derivative (needed for
`product: reverse`), and neither they nor torch's SiLU support forward mode over reverse mode (needed for `product:
forward`).
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlotool.core.arguments import require
from mlotool.core.rematerialization import remat
from mlotool.core.settings import Count, Layers, Share, target

# b: batch, t: tokens, w: width, h: heads, d: width of a head, f: width inside the feedforward


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of one, then each entry by a learned factor.

        y = g * x / sqrt(mean(x^2) + eps)

    In bf16 and fp16 it computes in fp32, and returns the input's dtype.

    Args:
        width: w, of the last dimension.
        epsilon: eps.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4.

    Example:
        >>> RMSNorm(2, epsilon=0.0)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., w), normalized."""
        precise = _at_least_fp32(x)
        scale = (precise.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt()
        return (precise * scale * self.weight).to(x.dtype)


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate each vector by angles proportional to its position (rotary position embedding).

    The entries i and i + d/2 of a vector at position p are a point of the plane, which is rotated by `p base^(-2i/d)`.
    So the inner product of two rotated vectors depends only on the difference of their positions.

    Args:
        x: (..., t, d) with d even; the position is the index in the dimension before the last.
        base: the slowest angle is about 1 / base per position.

    Returns:
        A tensor like x. In bf16 and fp16 the angles are fp32.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2.

    Example:
        >>> rotate(torch.ones(2, 2)).tolist()[0]  # position 0 stays
        [1.0, 1.0]
    """
    length, size = x.shape[-2:]
    precise = _at_least_fp32(x)
    position = torch.arange(length, device=x.device, dtype=precise.dtype)[:, None]  # (t, 1)
    plane = torch.arange(0, size, 2, device=x.device, dtype=precise.dtype)  # (d / 2,)
    angle = position * base ** (-plane / size)
    cos, sin = angle.cos(), angle.sin()  # each (t, d / 2)
    first, second = precise.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class CausalAttention(nn.Module):
    """Each token reads itself and the tokens before it.

        s_ij = <rotate(q_i), rotate(k_j)> / sqrt(d),   y_i = W sum_(j <= i) softmax_j(s_ij) v_j      (each head)

    Args:
        width: w.
        num_heads: h.
        kv_size: d, of a query, key or value.

    Cost: memory of the scores (b, h, t, t), which are kept for the backward pass.

    Example:
        >>> CausalAttention(8, num_heads=3, kv_size=4)(torch.ones(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, num_heads: int, kv_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = kv_size**-0.5
        self.query_key_value = nn.Linear(width, 3 * num_heads * kv_size, bias=False)
        self.output = nn.Linear(num_heads * kv_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output (b, t, w) for tokens x (b, t, w)."""
        heads = self.query_key_value(x).unflatten(2, (3, self.num_heads, -1))  # (b, t, 3, h, d)
        query, key, value = heads.transpose(1, 3).unbind(2)  # each (b, h, t, d)
        # The queries are scaled, not the scores, which are larger.
        scores = (rotate(query) * self.scale) @ rotate(key).transpose(2, 3)
        is_later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(diagonal=1)
        mixed = scores.masked_fill(is_later, torch.finfo(scores.dtype).min).softmax(dim=3) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """The part of a block that processes each token by itself.

        y = W_2 gelu(W_1 x)      or      y = W_2 (silu(W_g x) * W_1 x)      (`swiglu`)

    Args:
        width: w.
        hidden: f.
        kind: `gelu`, or `swiglu`, which has 1.5 times as many parameters.

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202), equation 6.

    Example:
        >>> [sum(each.numel() for each in Feedforward(4, 8, kind).parameters()) for kind in ("gelu", "swiglu")]
        [64, 96]
    """

    def __init__(self, width: int, hidden: int, kind: Literal["gelu", "swiglu"] = "gelu") -> None:
        super().__init__()
        self.input = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False) if kind == "swiglu" else None
        self.output = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, t, w) of x (b, t, w)."""
        if self.gate is None:
            return self.output(F.gelu(self.input(x)))
        gate = self.gate(x)
        return self.output(gate * gate.sigmoid() * self.input(x))


class DecoderBlock(nn.Module):
    """One pre-norm block: attention and a feedforward network, each with a residual connection.

        x = x + attention(norm(x)),   x = x + feedforward(norm(x))

    Args:
        width: w.
        hidden: f.
        num_heads: h.
        kv_size: d.
        feedforward: `gelu` or `swiglu`.
        dropout: probability with which entries of both outputs are dropped in training.

    Example:
        >>> DecoderBlock(8, 16, num_heads=2, kv_size=4)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_heads: int,
        kv_size: int,
        feedforward: Literal["gelu", "swiglu"] = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(width)
        self.attention = CausalAttention(width, num_heads, kv_size)
        self.norm_2 = RMSNorm(width)
        self.feedforward = Feedforward(width, hidden, feedforward)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, t, w) of x (b, t, w)."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.feedforward(self.norm_2(x)))


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# b: batch, t: tokens, w: width, v: vocabulary, L: blocks


@target("module")
class Decoder(nn.Module):
    """A language model: embeddings, pre-norm blocks of causal attention and a feedforward network, a norm, and a head.

        x = E[tokens]
        x = x + attention(norm(x)),   x = x + feedforward(norm(x))      (each block)
        logits = E norm(x)

    Positions are encoded by rotations of queries and keys, so a text may have any length. There are no biases. All
    operations have second derivatives, by double backward and by forward mode over reverse mode. The attribute `blocks`
    holds modules of one class that map x (b, t, w) to x (b, t, w).

    Entries of matrices are initialized from a normal distribution with variance 1 / inputs, and 1 / (2 L inputs) for
    the matrices whose results are added to x. So the sum of these 2 L results, and the gradient of each, does not
    depend on the depth.

    Args:
        vocabulary_size: v, number of token ids; 256 for bytes.
        width: w, of the vector of a token (d_model).
        hidden: width inside the feedforward networks (ffw_size).
        num_heads: heads of each attention (n_heads).
        kv_size: width of one head's queries, keys and values, any even number; None: `width / num_heads`.
        num_layers: L, number of blocks (n_layers).
        feedforward: `gelu`, as in Chinchilla, or `swiglu`, with three matrices instead of two.
        tied: whether the head uses the embedding's matrix; else it has its own.
        dropout: probability with which entries of the embeddings, and of the outputs that are added to x, are dropped
            in training.

    Raises:
        ConfigError: `kv_size` is odd, or it is None and `width` is not a multiple of `num_heads`; `feedforward` is
            another word.

    Source: Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (Chinchilla), with rotary positions (Su
        et al. 2021) as in Kemaev et al. 2025, MixFlow-MG, section 5.

    Example:
        >>> import torch
        >>> model, tokens = Decoder(256), torch.ones(3, 40, dtype=torch.int64)
        >>> model(tokens).shape, model.losses(tokens[:, :-1], tokens[:, 1:]).shape
        (torch.Size([3, 40, 256]), torch.Size([3, 39]))
    """

    def __init__(
        self,
        vocabulary_size: Count,
        width: Count = 64,
        hidden: Count = 256,
        num_heads: Count = 4,
        kv_size: Count | None = None,
        num_layers: Layers = 2,
        feedforward: Literal["gelu", "swiglu"] = "gelu",
        tied: bool = True,
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        self.width = width
        kv_size = _even_kv_size(kv_size, width, num_heads)
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
        """The matrix (v, w) that maps features to logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, t, v) for token ids (b, t); those at position i predict the token at position i + 1."""
        return self.features(tokens) @ self.head_weight.T

    def features(self, tokens: Tensor) -> Tensor:
        """Return the input of the head (b, t, w) for token ids (b, t)."""
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
        """Return the cross-entropy (b, t) of each token's prediction, in nats, without keeping all logits in memory.

        In a loss, call it as `model.method("losses", tokens, targets)`, where `model` is a role.

        Args:
            tokens: ids (b, t).
            targets: ids (b, t) of the tokens that follow.
            chunk: number of tokens whose logits are in memory at once; None: as many as have 2^22 logits.
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
    expected = f"a divisor of width={width} where kv_size is null"
    require(kv_size is not None or width % num_heads == 0, "Decoder.num_heads", num_heads, expected)
    size = width // num_heads if kv_size is None else kv_size
    expected = "a positive even number, since rotary positions turn pairs of entries"
    require(size >= 2 and size % 2 == 0, "Decoder.kv_size", size, expected)
    return size


# n: tokens of all texts, v: vocabulary, w: width

# Entries of the logits of one chunk where nothing else is said: 16 MiB in fp32.
LOGITS_AT_ONCE = 2**22


def token_losses(features: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Return the cross-entropy of each token for a linear head, computed for one chunk of tokens at a time.

        l_i = log sum_u exp(<W_u, x_i>) - <W_y(i), x_i>

    The logits of a chunk are computed again in the backward pass, and again in the backward pass of the backward pass.
    So those of all tokens, which take more memory than a small model's activations, are never in memory at once. A
    single chunk is computed without this.

    Args:
        features: (..., w), the input of the head.
        weight: (v, w), the head's matrix.
        targets: (...), ids of the tokens that are to be predicted.
        chunk: number of tokens at once; None: as many as have 2^22 logits.

    Returns:
        Losses (...), in fp32 or the head's higher precision.

    Raises:
        ConfigError: `chunk` is below 1.

    Cost: one more product with the head for each backward pass through it.

    Example:
        >>> token_losses(torch.ones(2, 3, 8), torch.zeros(4, 8), torch.zeros(2, 3, dtype=torch.int64), chunk=2)[0]
        tensor([1.3863, 1.3863, 1.3863])
    """
    chunk = max(1, LOGITS_AT_ONCE // weight.shape[0]) if chunk is None else chunk
    require(chunk >= 1, "chunk", chunk, "at least 1, the tokens whose logits live at once, or null")
    parts = features.flatten(0, -2).split(chunk), targets.flatten().split(chunk)
    if len(parts[0]) == 1:
        return _losses(features, weight, targets)
    losses = [remat(_losses, x, weight, y) for x, y in zip(*parts, strict=True)]
    return torch.cat(losses).unflatten(0, targets.shape)


def losses_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (...) of each token, of logits (..., v) and targets (...).

    Example:
        >>> losses_of_logits(torch.zeros(1, 4), torch.tensor([2]))
        tensor([1.3863])
    """
    # Under autocast and in bf16 the logits are coarse, but their exponentials need not be.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.logsumexp(dim=-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _losses(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return losses_of_logits(features @ weight.T, targets)
