"""A residual network that every rival trains: blocks of one shape, so that two stages have the same work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# b: batch, c: channels, h, w: height and width, k: classes

NUM_GROUPS, NUM_CLASSES, NUM_BATCHES = 8, 10, 2


class Stage(nn.Module):
    """Layers that compute in channels_last and talk, in both directions, in the usual order.

    gloo sends the bytes of a tensor as they lie, and torch's pipelines refuse a gradient in channels_last.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return contiguous features (b, c, h, w), or logits (b, k)."""
        features = self.layers(_Relaid.apply(images, torch.channels_last, torch.contiguous_format))
        if features.dim() == 2:
            return features
        return _Relaid.apply(features, torch.contiguous_format, torch.channels_last)


class _Relaid(torch.autograd.Function):
    """The same numbers in one order of memory, and their gradient in another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: torch.memory_format, order_back: torch.memory_format) -> Tensor:
        ctx.order_back = order_back
        return tensor.contiguous(memory_format=order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.contiguous(memory_format=ctx.order_back), None, None


class Block(nn.Module):
    """x + C(relu(N(C(relu(N(x)))))): pre-activation, GroupNorm for N, which treats each sample by itself."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(NUM_GROUPS, num_channels) for _ in range(2))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False) for _ in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return features of the same shape (b, c, h, w)."""
        features = images
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            features = convolution(F.relu(norm(features)))
        return images + features


class Head(nn.Module):
    """Logits (b, k) of the mean over pixels."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(NUM_GROUPS, num_channels)
        self.classifier = nn.Linear(num_channels, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (b, k) of features (b, c, h, w)."""
        return self.classifier(F.relu(self.norm(features)).mean(dim=(2, 3)))


@dataclass(frozen=True)
class Workload:
    """What is trained, whoever trains it.

    Args:
        num_blocks: residual blocks of two convolutions each; a multiple of the stages.
        num_channels: c.
        image_size: h and w.
        batch_size: b.
        learning_rate: of plain SGD.
        dtype: of parameters and images.
    """

    num_blocks: int = 12
    num_channels: int = 64
    image_size: int = 16
    batch_size: int = 96
    learning_rate: float = 0.005
    dtype: torch.dtype = torch.float32

    def make_stages(self, num_stages: int) -> list[Stage]:
        """Return the model in parts, the same parameters at every call whatever the number of parts."""
        torch.manual_seed(0)
        stem = nn.Conv2d(3, self.num_channels, 3, padding=1)
        layers = [stem, *(Block(self.num_channels) for _ in range(self.num_blocks)), Head(self.num_channels)]
        share = self.num_blocks // num_stages
        bounds = [0, *(1 + share * k for k in range(1, num_stages)), len(layers)]
        return [
            Stage(layers[begin:end]).to(self.dtype, memory_format=torch.channels_last)
            for begin, end in pairwise(bounds)
        ]

    def make_model(self) -> Stage:
        """Return the whole model."""
        return self.make_stages(1)[0]

    def samples(self) -> dict[str, Tensor]:
        """Return noise (n, 3, h, w) and targets (n), of NUM_BATCHES batches."""
        generator = torch.Generator().manual_seed(1)
        num_samples = NUM_BATCHES * self.batch_size
        images = torch.randn(num_samples, 3, self.image_size, self.image_size, generator=generator)
        targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
        return {"input": images.to(self.dtype), "target": targets}

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches in turn, for ever."""
        samples = self.samples()
        parts = [samples[name].split(self.batch_size) for name in ("input", "target")]
        return cycle(zip(*parts, strict=True))
