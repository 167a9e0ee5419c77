"""A residual network of blocks of one shape, so that stages have the same work."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layerparallel.stages import Relaid
from benchmarks.layerparallel.workload import AbstractWorkload, noise

# b: batch, c: channels, h, w: height and width, k: classes

NUM_GROUPS, NUM_CLASSES = 8, 10
AUXNET_SHARE = 6
"""An AuxNet has a sixth of the blocks, as the paper's ResNet-20 has of the ResNet-110's; but one a stage at least."""


class Stage(nn.Module):
    """Layers that compute in channels_last and talk, in both directions, in the usual order.

    gloo sends the bytes of a tensor as they lie, and torch's pipelines refuse a gradient in channels_last.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return contiguous features (b, c, h, w), or logits (b, k)."""
        features = self.layers(Relaid.apply(images, torch.channels_last, torch.contiguous_format))
        if features.dim() == 2:
            return features
        return Relaid.apply(features, torch.contiguous_format, torch.channels_last)


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
class Workload(AbstractWorkload):
    """Equal stages and no coupling of samples: what is lost here is lost to the method alone.

    Args:
        num_blocks: residual blocks of two convolutions each.
        num_channels: c.
        image_size: h and w.
    """

    batch_size: int = 96
    learning_rate: float = 0.005
    num_blocks: int = 12
    num_channels: int = 64
    image_size: int = 16

    def make_model(self) -> nn.Module:
        """Return the whole model."""
        return self.make_stages(1)[0]

    def make_stages(self, num_stages: int) -> list[nn.Module]:
        """Return the model in parts, the same parameters at every call whatever the number of parts."""
        return self._stages(self.num_blocks, num_stages)

    def make_cut(self, num_stages: int) -> tuple[nn.Module, Sequence[str]]:
        """Return the parts one after the other, and their names but the first's."""
        return nn.Sequential(*self.make_stages(num_stages)), [str(number) for number in range(1, num_stages)]

    def make_auxnet(self, num_stages: int) -> nn.Module:
        """Return a network of fewer blocks, in as many parts."""
        num_blocks = max(self.num_blocks // AUXNET_SHARE, num_stages)
        return nn.Sequential(*self._stages(num_blocks, num_stages))

    def samples(self) -> dict[str, Tensor]:
        """Return noise (n, 3, h, w), and targets (n)."""
        return noise(self.num_samples, (3, self.image_size, self.image_size), NUM_CLASSES, self.dtype)

    def _stages(self, num_blocks: int, num_stages: int) -> list[nn.Module]:
        if num_blocks < num_stages:
            raise ValueError(f"{num_blocks} blocks cannot be cut into {num_stages} stages")
        torch.manual_seed(0)
        stem = nn.Conv2d(3, self.num_channels, 3, padding=1)
        layers = [stem, *(Block(self.num_channels) for _ in range(num_blocks)), Head(self.num_channels)]
        share, rest = divmod(num_blocks, num_stages)
        # Larger parts first: of two parts a rank, k and k + K or k and 2K - 1 - k, each rank then has as many blocks.
        ends = list(accumulate((share + (number < rest) for number in range(num_stages)), initial=1))
        bounds = [0, *ends[1:-1], len(layers)]
        found = [Stage(layers[begin:end]) for begin, end in pairwise(bounds)]
        return [each.to(memory_format=torch.channels_last) for each in self.settled(found)]
