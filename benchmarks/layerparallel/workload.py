"""What a workload of the part `times` has to say of itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# n: samples, b: batch, k: classes

NUM_BATCHES = 8
"""Distinct ones. A stored variable comes again after so many steps."""


@dataclass(frozen=True)
class AbstractWorkload(ABC):
    """What is trained, whoever trains it: the same parameters and batches at every call.

    Args:
        batch_size: b.
        learning_rate: of SGD.
        momentum: of SGD.
        dtype: of parameters and of inputs that are no numbers of tokens.
        num_batches: distinct ones.
        has_fixed_statistics: whether BatchNorm normalises by its running statistics, as it does for evaluation: then
            the gradient of a batch is the mean of its parts' gradients, as it is without BatchNorm.
    """

    batch_size: int = 32
    learning_rate: float = 0.01
    momentum: float = 0.0
    dtype: torch.dtype = torch.float32
    num_batches: int = NUM_BATCHES
    has_fixed_statistics: bool = False

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Return the whole model, as serial and data-parallel training take it."""

    @abstractmethod
    def make_stages(self, num_stages: int) -> list[nn.Module]:
        """Return the model in parts, each of which takes what the one before returns.

        Raises:
            ValueError: it has too few layers.
        """

    @abstractmethod
    def make_cut(self, num_stages: int) -> tuple[nn.Module, Sequence[str]]:
        """Return the model as mlotool cuts it into the same parts, and the names of the layers that begin them."""

    @abstractmethod
    def make_auxnet(self, num_stages: int) -> nn.Module | None:
        """Return the small network for auxiliary variables; None: thinned copies of the stages."""

    @abstractmethod
    def samples(self) -> dict[str, Tensor]:
        """Return `input` (n, ...) and `target` (n, ...), of all batches."""

    @property
    def num_samples(self) -> int:
        """How many samples all batches have."""
        return self.num_batches * self.batch_size

    @property
    def make_optimizer(self) -> Any:
        """Return what makes the optimizer of parameters."""
        return partial(torch.optim.SGD, lr=self.learning_rate, momentum=self.momentum)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches in turn, for ever."""
        samples = self.samples()
        parts = [samples[name].split(self.batch_size) for name in ("input", "target")]
        return cycle(zip(*parts, strict=True))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (..., k) and targets (...)."""
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())

    def settled(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return modules in the workload's dtype and mode."""
        return [each.to(self.dtype).train(not self.has_fixed_statistics) for each in modules]


def noise(num_samples: int, shape: Sequence[int], num_classes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return images of noise (n, *shape), and targets (n)."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_samples, *shape, generator=generator)
    return {"input": images.to(dtype), "target": torch.randint(num_classes, (num_samples,), generator=generator)}
