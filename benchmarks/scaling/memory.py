"""Bytes of the lower step of Meta-Weight-Net with a ResNet-50, computed from shapes: nothing is allocated."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary
from torchvision.models import resnet50

from benchmarks.betty.task import sample_losses

BATCH_SIZE, IMAGE_SIZE, NUM_CLASSES = 100, 32, 10
"""Those of Betty's example of Meta-Weight-Net on CIFAR-10."""
STEMS = ("imagenet", "cifar")
"""torchvision's own, and a 3x3 convolution of stride 1 without max-pooling; Betty's paper does not say which."""


def compute() -> list[dict[str, Any]]:
    """Return a row for each stem, precision and number of ranks."""
    return [
        _row(stem, precision, num_ranks) for stem in STEMS for precision in ("fp32", "bf16") for num_ranks in (1, 2)
    ]


def _row(stem: str, precision: str, num_ranks: int) -> dict[str, Any]:
    with FakeTensorMode():
        model = _model(stem)
        parameters = sum(each.numel() * each.element_size() for each in model.parameters())
        activations = _saved_bytes(model, precision, BATCH_SIZE // num_ranks)
    return {
        "stem": stem,
        "precision": precision,
        "num_ranks": num_ranks,
        "parameters": parameters,
        "gradient": parameters,
        "momentum": parameters,
        "exchange": parameters if num_ranks > 1 else 0,
        "activations": activations,
        "total": parameters * (3 + (num_ranks > 1)) + activations,
    }


def _saved_bytes(model: nn.Module, precision: str, batch_size: int) -> int:
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
        losses = sample_losses(model(batch["input"]), batch)
        # The weight net needs no gradient here; its outputs are a number a sample.
        loss = (torch.ones(batch_size, 1) * losses).mean()
    assert loss.requires_grad
    return sum(storages.values())


def _model(stem: str) -> nn.Module:
    model = resnet50(num_classes=NUM_CLASSES)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model
