"""What all rivals share: the data, the models and the settings of Meta-Weight-Net on long-tailed digits."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchvision.models import resnet50

from mlotool.models import ResNet, TextTransformer, WideResNet

BATCH_SIZE_LOWER, BATCH_SIZE_UPPER = 64, 50
LEARNING_RATE_LOWER, MOMENTUM, LEARNING_RATE_UPPER = 0.1, 0.9, 1e-3
RADIUS = 0.01
"""Norm of a finite difference's perturbation; Betty's default."""
NUM_PRODUCTS = 3
"""Hessian-vector products of Neumann and CG: Betty's K."""
CG_PROXIMAL_WEIGHT = 10.0
"""Weight of `0.5 |theta - theta_0|^2` (iMAML's) in the lower loss under CG, for all rivals: without it a network's
Hessian is indefinite, and mlotool's CG, unlike the others, stops where it meets negative curvature. Plain weight decay
does not do: it shrinks the weights before a BatchNorm, which raises the curvature."""
MODELS = ("mlp", "resnet")
"""On digits."""
LARGE_MODELS = ("resnet32", "wrn28_10", "transformer", "resnet50")
"""On images of 32 x 32 pixels and texts of 64 tokens, of noise: for times alone."""
ALGORITHMS = ("fd", "neumann", "cg")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """One comparison.

    Args:
        model: one of MODELS or LARGE_MODELS.
        algorithm: one of ALGORITHMS.
        device: where everything lives.
        dtype: of parameters and inputs.
        precision: in which losses are evaluated, "fp32" or "bf16".
        is_small: a large model has few layers and batches of 2, to try that it works.
    """

    model: str
    algorithm: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    precision: str = "fp32"
    is_small: bool = False

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Samples of a batch of the lower and of the upper problem."""
        if self.model in LARGE_MODELS:
            return (2, 2) if self.is_small else (100, 100)
        return BATCH_SIZE_LOWER, BATCH_SIZE_UPPER

    def make_classifier(self) -> nn.Module:
        """Return the lower problem's model, the same at every call."""
        torch.manual_seed(0)
        make = (_SMALL if self.is_small else _CLASSIFIERS).get(self.model, _CLASSIFIERS[self.model])
        return make().to(self.device, self.dtype)

    def make_weight_net(self) -> nn.Module:
        """Return the upper problem's model, the same at every call: a sample's loss (b, 1) in, its weight out."""
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1), nn.Sigmoid())
        return net.to(self.device, self.dtype)

    def regularize(self, loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """Return the lower loss with the proximal term that CG needs."""
        if self.algorithm != "cg":
            return loss
        pairs = zip(parameters, _start(self), strict=True)
        distance = torch.stack([(each - start).square().sum() for each, start in pairs]).sum()
        return loss + 0.5 * CG_PROXIMAL_WEIGHT * distance

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the long-tailed train split of 347 images and a balanced meta split of 100."""
        return _datasets(self.device, self.dtype)

    def batches(self) -> tuple[list[Batch], list[Batch]]:
        """Return batches made beforehand for the lower and the upper problem: four epochs of the train split."""
        if self.model in LARGE_MODELS:
            return _noise(self, 0, self.batch_sizes[0]), _noise(self, 1, self.batch_sizes[1])
        train, meta = self.datasets()
        return _epochs(train, BATCH_SIZE_LOWER, 4), _epochs(meta, BATCH_SIZE_UPPER, 10)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a loss, for those who write it themselves."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, torch.bfloat16, cache_enabled=False)


@lru_cache
def _start(task: Task) -> list[Tensor]:
    return [parameter.detach() for parameter in task.make_classifier().parameters()]


@lru_cache
def _datasets(device: str, dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    images, target = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=dtype).view(-1, 1, 8, 8).div(16).to(device)
    labels = torch.tensor(target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    counts = [round(124 * 50 ** (-label / 9)) for label in range(10)]
    by_class = [order[labels[order] == label] for label in range(10)]
    meta = torch.cat([indices[:10] for indices in by_class])
    train = torch.cat([indices[10 : 10 + count] for indices, count in zip(by_class, counts, strict=True)])
    assert len(train) == 347, len(train)
    labels = labels.to(device)
    return TensorDataset(inputs[train], labels[train]), TensorDataset(inputs[meta], labels[meta])


def sample_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Return (b, 1) cross entropies."""
    return functional.cross_entropy(logits, batch["target"], reduction="none").unsqueeze(1)


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(logits, batch["target"])


class CyclingBatches:
    """Batches made beforehand, without end, with the interface of a stream."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches
        self._position = 0

    def next(self) -> Batch:
        """Return the next batch."""
        batch = self.peek()
        self._position += 1
        return batch

    def peek(self) -> Batch:
        """Return the batch that `next` will return."""
        return self._batches[self._position % len(self._batches)]

    def last(self) -> Batch:
        """Return the batch that `next` returned last."""
        return self._batches[(self._position - 1) % len(self._batches)]

    def at(self, state: dict[str, int]) -> "CyclingBatches":
        """Return the same batches, at a position."""
        other = CyclingBatches(self._batches)
        other.load_state_dict(state)
        return other

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._position = state["position"]


class _Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )


class _ResNet(nn.Sequential):
    """19,642 parameters: a stem, one block of 16 channels at 8x8, one of 32 at 4x4."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            _Block(16, 16, 1),
            _Block(16, 32, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def _epochs(dataset: TensorDataset, batch_size: int, num_epochs: int) -> list[Batch]:
    inputs, target = dataset.tensors
    batches = []
    for epoch in range(num_epochs):
        order = torch.randperm(len(target), generator=torch.Generator().manual_seed(epoch)).to(target.device)
        parts = order.split(batch_size)
        batches += [{"input": inputs[part], "target": target[part]} for part in parts if len(part) == batch_size]
    return batches


VOCABULARY_SIZE, LENGTH = 1_000, 64
NUM_BATCHES = 4
_CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _Mlp,
    "resnet": _ResNet,
    "resnet32": partial(ResNet, 32, 10, [3, 32, 32]),
    "wrn28_10": partial(WideResNet, 28, 10, 10, [3, 32, 32]),
    "resnet50": partial(resnet50, num_classes=10),
    "transformer": partial(
        TextTransformer, VOCABULARY_SIZE, LENGTH, 10, width=256, num_heads=8, num_layers=6, hidden=1024
    ),
}
_SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet32": partial(ResNet, 8, 10, [3, 32, 32]),
    "wrn28_10": partial(WideResNet, 10, 1, 10, [3, 32, 32]),
    "transformer": partial(TextTransformer, VOCABULARY_SIZE, LENGTH, 10),
}


def _noise(task: Task, seed: int, batch_size: int) -> list[Batch]:
    """Return batches without content."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(NUM_BATCHES):
        if task.model == "transformer":
            inputs = torch.randint(1, VOCABULARY_SIZE, (batch_size, LENGTH), generator=generator)
        else:
            inputs = torch.randn(batch_size, 3, 32, 32, generator=generator).to(task.dtype)
        target = torch.randint(10, (batch_size,), generator=generator)
        batches.append({"input": inputs.to(task.device), "target": target.to(task.device)})
    return batches
