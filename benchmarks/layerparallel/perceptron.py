"""A wide perceptron at a small batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.layerparallel.stages import traced_stages
from benchmarks.layerparallel.workload import AbstractWorkload, noise
from mlotool.models import MLP

NUM_CLASSES, IMAGE_SHAPE = 10, (1, 28, 28)
CUTS = {2: ("layers.5",), 4: ("layers.3", "layers.5", "layers.7")}


@dataclass(frozen=True)
class PerceptronWorkload(AbstractWorkload):
    """Many parameters beside a batch: data parallelism averages all of them, stages hand over activations alone.

    Args:
        width: of each of the four hidden layers.
    """

    batch_size: int = 32
    learning_rate: float = 0.02
    momentum: float = 0.9
    width: int = 2048

    def make_model(self) -> nn.Module:
        """Return the whole model."""
        torch.manual_seed(0)
        [model] = self.settled([MLP(IMAGE_SHAPE, NUM_CLASSES, 4 * [self.width])])
        return model

    def make_stages(self, num_stages: int) -> list[nn.Module]:
        """Return the model in parts."""
        return traced_stages(*self.make_cut(num_stages), next(self.batches())[0])

    def make_cut(self, num_stages: int) -> tuple[nn.Module, Sequence[str]]:
        """Return the whole model, and the layers that begin its parts."""
        if num_stages not in CUTS:
            raise ValueError(f"5 layers cannot be cut into {num_stages} stages")
        return self.make_model(), CUTS[num_stages]

    def make_auxnet(self, num_stages: int) -> None:
        """Take thinned copies of the stages, as the table of accuracies does.

        They keep a layer of each shape, so that there is little to leave out of a stage of one or two layers.
        """

    def samples(self) -> dict[str, Tensor]:
        """Return noise (n, 1, 28, 28), and targets (n)."""
        return noise(self.num_samples, IMAGE_SHAPE, NUM_CLASSES, self.dtype)
