"""A network for texts of token ids: layers one after the other, each of which keeps the shape."""

from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import BelowOne, Count, Layers, target

# b: batch, t: tokens, w: width, h: heads


def attended(query_key_value: Tensor, num_heads: int, is_word: Tensor | None = None) -> Tensor:
    """Return the output of attention, without torch's fused kernels, which have no second derivative.

    Args:
        query_key_value: (b, t, 3 w).
        num_heads: h.
        is_word: (b, t), which tokens may be attended to; None: all.

    Returns:
        (b, t, w).
    """
    heads = query_key_value.unflatten(2, (3, num_heads, -1))  # (b, t, 3, h, w / h)
    query, key, value = heads.transpose(1, 3).unbind(2)  # each (b, h, t, w / h)
    scores = query @ key.transpose(2, 3) / sqrt(query.shape[3])
    if is_word is not None:
        # Not -inf: a text of padding alone would have no softmax.
        scores = scores.masked_fill(~is_word[:, None, None, :], torch.finfo(scores.dtype).min)
    return (scores.softmax(dim=3) @ value).transpose(1, 2).flatten(2)


def mean_of_words(x: Tensor, is_word: Tensor) -> Tensor:
    """Return the mean (b, w) of those tokens x (b, t, w) that are words (b, t)."""
    share = is_word.to(x.dtype)
    return (x * share[:, :, None]).sum(dim=1) / share.sum(dim=1).clamp_min(1.0)[:, None]


@target("module")
class TextConvolution(nn.Module):
    """A convolution along the tokens, (b, t, w) to (b, t, w).

    Args:
        embed_dim: w.
        kernel_size: number of tokens in the window, odd.

    Source: Wang et al. 2020, TextNAS (arXiv 1912.10729), section 3.1, as all operations here.
    """

    def __init__(self, embed_dim: Count, kernel_size: Count = 3) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(embed_dim, embed_dim, kernel_size, padding=kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, t, w)."""
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


@target("module")
class TextRecurrence(nn.Module):
    """The sum of two recurrent layers, one in each direction: (b, t, w) to (b, t, w).

    Args:
        embed_dim: w.
    """

    def __init__(self, embed_dim: Count) -> None:
        super().__init__()
        self.recurrence = nn.GRU(embed_dim, embed_dim, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, t, w)."""
        return self.recurrence(x)[0].unflatten(2, (2, -1)).sum(dim=2)


@target("module")
class TextAttention(nn.Module):
    """Attention of all tokens to all tokens, (b, t, w) to (b, t, w).

    Args:
        embed_dim: w, a multiple of `num_heads`.
        num_heads: h.

    Raises:
        ConfigError: `embed_dim` is not a multiple of `num_heads`.
    """

    def __init__(self, embed_dim: Count, num_heads: Count = 4) -> None:
        super().__init__()
        require(embed_dim % num_heads == 0, "num_heads", num_heads, f"a divisor of embed_dim={embed_dim}")
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(embed_dim, 3 * embed_dim)
        self.output = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, t, w)."""
        return self.output(attended(self.query_key_value(x), self.num_heads))


@target("module")
class TextPooling(nn.Module):
    """Maximum or mean over a window around each token, (b, t, w) to (b, t, w).

    Args:
        kind: `max` or `mean`.
        size: number of tokens in the window, odd.

    Raises:
        ConfigError: another kind.

    Example:
        >>> import torch
        >>> TextPooling("max")(torch.tensor([[[1.0], [3.0], [2.0]]])).flatten()
        tensor([3., 3., 3.])
    """

    def __init__(self, kind: Literal["max", "mean"] = "max", size: Count = 3) -> None:
        super().__init__()
        pool = nn.MaxPool1d if kind == "max" else nn.AvgPool1d
        self.pool: nn.Module = pool(size, stride=1, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, t, w)."""
        return self.pool(x.transpose(1, 2)).transpose(1, 2)


# b: batch, t: tokens, w: width, k: classes

PADDING = 0


@target("module")
class TextNetwork(nn.Module):
    """A text classifier: embeddings, layers with one operation each, the mean over tokens, a linear layer.

        x_0 = E[tokens],   x_i = relu(norm(operation_i(x_{i-1}))),   logits = W mean over words of x_n

    Padding (id 0) is embedded as zeros and left out of the mean.

    Args:
        vocabulary_size: number of token ids.
        num_classes: k.
        width: w.
        num_layers: n.
        kernel_size: size of the convolution that is each layer's operation.

    Source: Wang et al. 2020, TextNAS (arXiv 1912.10729), figure 1: the layers that its search chooses.

    Example:
        >>> import torch
        >>> TextNetwork(100, 2)(torch.ones(3, 40, dtype=torch.int64)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        vocabulary_size: Count,
        num_classes: Count,
        width: Count = 16,
        num_layers: Layers = 3,
        kernel_size: Count = 3,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width, padding_idx=PADDING)
        self.layers = nn.Sequential(*(_Layer(width, kernel_size) for _ in range(num_layers)))
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, k) of token ids (b, t)."""
        return self.classifier(mean_of_words(self.layers(self.embedding(tokens)), tokens != PADDING))


class _Layer(nn.Module):
    def __init__(self, width: int, kernel_size: int) -> None:
        super().__init__()
        self.operation = TextConvolution(width, kernel_size)
        self.norm = nn.LayerNorm(width)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.operation(x)))


# b: batch, t: tokens, w: width, h: heads, k: classes


@target("module")
class TextTransformer(nn.Module):
    """A text classifier: embeddings, pre-norm transformer blocks, the mean or first token, and a linear layer.

        x = E[tokens] + P
        x = x + attention(norm(x)),   x = x + W_2 gelu(W_1 norm(x))      (each block)
        logits = W pool(norm(x))

    Padding (id 0) is not attended to and left out of the mean. P are learned positions.

    Args:
        vocabulary_size: number of token ids.
        length: largest t, in tokens.
        num_classes: k.
        width: w, a multiple of `num_heads`.
        num_heads: h.
        num_layers: number of blocks.
        hidden: width of the hidden layer of a block.
        dropout: probability with which entries of the outputs that are added to x are dropped in training.
        pooling: `mean`, over all tokens except padding, or `first`, the first token (as in BERT).

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
        require(width % num_heads == 0, "num_heads", num_heads, f"a divisor of width={width}")
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
        """Return the input of the last layer (b, w), and the logits (b, k)."""
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
