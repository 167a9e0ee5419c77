"""Data: an object with `splits` and with `split(name)`, which returns a data set of (input, target) pairs."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


class TwoMoons:
    """Points on two interleaving half circles; some labels of the split `train` are wrong.

    Args:
        sizes: number of samples of each split.
        mistakes: for each class, the share of its training samples that get the label of the other class.
        noise: standard deviation of the noise that is added to the points.
        seed: of the points and of the wrong labels.
    """

    num_classes = 2

    def __init__(
        self, sizes: Mapping[str, int], mistakes: Sequence[float] = (0.0, 0.0), noise: float = 0.2, seed: int = 0
    ) -> None:
        self.sizes, self.mistakes, self.noise, self.seed = dict(sizes), mistakes, noise, seed
        self.splits = tuple(self.sizes)

    def split(self, name: str) -> TensorDataset:
        """Return a split; every call returns the same samples."""
        # Each split has its own random generator, so that its samples do not depend on the sizes of other splits.
        generator = torch.Generator().manual_seed(1000 * self.seed + self.splits.index(name))
        points, labels = self._draw(self.sizes[name], generator)
        if name == "train":
            is_wrong = torch.rand(len(labels), generator=generator) < torch.tensor(self.mistakes)[labels]
            labels = torch.where(is_wrong, 1 - labels, labels)
        return TensorDataset(points, labels)

    def _draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.arange(size) % 2
        angle = math.pi * torch.rand(size, generator=generator)
        upper = torch.stack([angle.cos(), angle.sin()], dim=1)
        lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
        points = torch.where(labels[:, None] == 0, upper, lower)
        return points + self.noise * torch.randn(size, 2, generator=generator), labels
