"""A network for texts of token ids: layers one after the other, each of which keeps the shape."""

from torch import Tensor, nn

from mlotool.models.text_operations import TextConvolution

# b: batch, t: tokens, w: width, k: classes

PADDING = 0


class TextNetwork(nn.Module):
    """Embeddings, layers of an operation each, the mean over tokens, a linear layer.

        x_0 = E[tokens],   x_i = relu(norm(operation_i(x_{i-1}))),   logits = W mean over words of x_n

    Padding (id 0) is embedded as zeros and has no part in the mean.

    Args:
        vocabulary_size: number of token ids.
        num_classes: k.
        width: w.
        num_layers: n.
        kernel_size: of the convolution that is each layer's operation.

    Source: Wang et al. 2020, TextNAS (arXiv 1912.10729), figure 1: the layers that its search chooses.

    Example:
        >>> import torch
        >>> TextNetwork(100, 2)(torch.ones(3, 40, dtype=torch.int64)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, vocabulary_size: int, num_classes: int, width: int = 16, num_layers: int = 3, kernel_size: int = 3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width, padding_idx=PADDING)
        self.layers = nn.Sequential(*(_Layer(width, kernel_size) for _ in range(num_layers)))
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, k) of token ids (b, t)."""
        x = self.layers(self.embedding(tokens))
        is_word = (tokens != PADDING).to(x.dtype)
        words = (x * is_word[:, :, None]).sum(dim=1)
        return self.classifier(words / is_word.sum(dim=1).clamp_min(1.0)[:, None])


class _Layer(nn.Module):
    def __init__(self, width: int, kernel_size: int) -> None:
        super().__init__()
        self.operation = TextConvolution(width, kernel_size)
        self.norm = nn.LayerNorm(width)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.operation(x)))
