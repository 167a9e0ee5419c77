"""The ResNet-14 that the recipe layerparallel_penalty trains."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.layerparallel.stages import traced_stages
from benchmarks.layerparallel.workload import AbstractWorkload, noise
from mlotool.models import ResNet

DEPTH, NUM_CLASSES, IMAGE_SHAPE = 14, 10, (1, 28, 28)
CUTS = {
    2: ("stages.0.1",),
    4: ("stages.0.1", "stages.1.0", "stages.2.0"),
    8: ("norm", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "stages.2.0", "stages.2.1"),
}
"""By time, as blocks of four channels take far more of it than their operations say."""


@dataclass(frozen=True)
class ResNetWorkload(AbstractWorkload):
    """BatchNorm and uneven blocks: a network as users have it, and the one of the table of accuracies on MNIST.

    96 images a batch, where the recipe has 100: pipelines cut a batch into 8 equal parts.

    Args:
        width: channels of the first blocks.
    """

    batch_size: int = 96
    learning_rate: float = 0.1
    momentum: float = 0.9
    width: int = 4

    def make_model(self) -> nn.Module:
        """Return the whole model."""
        torch.manual_seed(0)
        [model] = self.settled([ResNet(DEPTH, NUM_CLASSES, IMAGE_SHAPE, self.width)])
        return model

    def make_stages(self, num_stages: int) -> list[nn.Module]:
        """Return the model in parts."""
        return traced_stages(*self.make_cut(num_stages), next(self.batches())[0])

    def make_cut(self, num_stages: int) -> tuple[nn.Module, Sequence[str]]:
        """Return the whole model, and the blocks that begin its parts."""
        return self.make_model(), CUTS[num_stages]

    def make_auxnet(self, num_stages: int) -> None:
        """Take thinned copies of the stages, as the recipe layerparallel_resnet does: a block of each shape."""

    def samples(self) -> dict[str, Tensor]:
        """Return noise (n, 1, 28, 28) in place of digits, and targets (n)."""
        return noise(self.num_samples, IMAGE_SHAPE, NUM_CLASSES, self.dtype)
