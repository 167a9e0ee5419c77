"""Bytes of the lower steps of Meta-Weight-Net with a ResNet-50 and of DARTS, computed: nothing is allocated.

After tables 8 and 9 of Betty's paper (arXiv 2207.02849).
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary
from torchvision.models import resnet50

import mlotool
from benchmarks.betty.task import sample_losses
from mlotool.config.building import build_module
from mlotool.spaces.shared.shared_space import SharedSpace

IMAGE_SIZE, NUM_CLASSES = 32, 10
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A lower problem's step.

    Args:
        model: makes its module.
        loss: of the module on a batch.
        batch_size: samples of all ranks.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch_size: int


def compute() -> list[dict[str, Any]]:
    """Return a row for each task, precision and number of ranks."""
    return [row_of(name, precision, ranks) for name in TASKS for precision in ("fp32", "bf16") for ranks in (1, 2)]


def row_of(name: str, precision: str, num_ranks: int) -> dict[str, Any]:
    """Return the bytes of one task, precision and number of ranks."""
    task = TASKS[name]
    with FakeTensorMode():
        model = task.model()
        parameters = sum(each.numel() * each.element_size() for each in model.parameters())
        activations = _saved_bytes(model, task.loss, precision, task.batch_size // num_ranks)
    return {
        "task": name,
        "precision": precision,
        "num_ranks": num_ranks,
        "parameters": parameters,
        "gradient": parameters,
        "momentum": parameters,
        "exchange": parameters if num_ranks > 1 else 0,
        "activations": activations,
        "total": parameters * (3 + (num_ranks > 1)) + activations,
    }


def _saved_bytes(
    model: nn.Module, loss_of: Callable[[nn.Module, Batch], Tensor], precision: str, batch_size: int
) -> int:
    """Return what the forward pass of the lower loss keeps for its backward pass, parameters and images excluded."""
    batch = {
        "input": torch.empty(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE),
        "target": torch.empty(batch_size, dtype=torch.long),
    }
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    # Views share a storage. The tensors are kept, lest a new storage gets the identity of a dead one.
    storages: Any = WeakIdKeyDictionary({each.untyped_storage(): 0 for each in known})
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storages.setdefault(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return tensor

    autocast = nullcontext() if precision == "fp32" else torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        loss = loss_of(model, batch)
    assert loss.requires_grad
    return sum(storages.values())


def _resnet(stem: str) -> nn.Module:
    model = resnet50(num_classes=NUM_CLASSES)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def _weighted_loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = sample_losses(model(batch["input"]), batch)
    # The weight net needs no gradient here; its outputs are a number a sample.
    return (torch.ones(len(losses), 1) * losses).mean()


def _search_network() -> nn.Module:
    return build_module(mlotool.compose("darts_paper", ["data.root=."]), "classifier")


def _search_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, SharedSpace)
    # The architecture needs no gradient here.
    weights = {each.name: torch.full((len(each.candidates),), 1 / len(each.candidates)) for each in model.table}
    return F.cross_entropy(model(batch["input"], path=weights), batch["target"])


TASKS = {
    # torchvision's own stem, and a 3x3 convolution of stride 1 without max-pooling: Betty's paper does not say which.
    "mwn, imagenet stem": Task(partial(_resnet, "imagenet"), _weighted_loss, 100),
    "mwn, cifar stem": Task(partial(_resnet, "cifar"), _weighted_loss, 100),
    "darts": Task(_search_network, _search_loss, 64),
}
"""With the sizes of Betty's example of Meta-Weight-Net on CIFAR-10, and of the search of the DARTS paper."""
