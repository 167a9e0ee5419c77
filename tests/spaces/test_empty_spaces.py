"""A space without mutators is its base, bit by bit."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import models
from mlotool.spaces import Space

Inputs = tuple[Tensor, ...]
IMAGE = [1, 8, 8]
TOKENS = [{"shape": [40], "dtype": "int64"}]

OURS: dict[str, tuple[Callable[[], nn.Module], Sequence[Any], Sequence[str]]] = {
    "mlp": (lambda: models.MLP(IMAGE, 10), IMAGE, ()),
    "linear": (lambda: models.Linear(IMAGE, 10), IMAGE, ()),
    "resnet": (lambda: models.ResNet(8, 10, IMAGE, 4), IMAGE, ()),
    "wide_resnet": (lambda: models.WideResNet(10, 1, 10, [3, 8, 8]), [3, 8, 8], ()),
    "text_transformer": (lambda: models.TextTransformer(100, 40, 2, dropout=0.1), TOKENS, ["blocks.*"]),
    "decoder": (lambda: models.Decoder(64), TOKENS, ["blocks.*"]),
    "dense": (lambda: models.DenseResidualNetwork([2], 5, 8), [2], []),
    "convolutional": (lambda: models.ConvolutionalResidualNetwork(IMAGE, 10, 8), IMAGE, []),
    "cells": (lambda: models.CellNetwork(IMAGE, 10, width=4, num_cells=3, num_nodes=2, stem_multiplier=1), IMAGE, ()),
    "weight_net": (models.WeightNet, [1], ()),
    "sample_weights": (lambda: models.SampleWeights(5), [{"shape": [], "dtype": "int64"}], ()),
    "perturbation": (lambda: models.BoundedPerturbation(IMAGE, 5, 0.5), [{"shape": [], "dtype": "int64"}], ["."]),
    "sequence_weigher": (lambda: models.SequenceWeigher(models.Decoder(64)), TOKENS, ["decoder.blocks.*"]),
    "label_corrector": (lambda: models.LabelCorrector(8, 3), [[8], {"shape": [], "dtype": "int64"}], ()),
    "positive_vector": (lambda: models.PositiveVector(3, 0.1), [], ()),
    "mixture_weights": (lambda: models.MixtureWeights(3), [], ()),
}

OF_TORCHVISION = {
    "alexnet": 64, "densenet121": 64, "efficientnet_b0": 64, "mnasnet0_5": 64, "mobilenet_v2": 64,
    "mobilenet_v3_small": 64, "regnet_y_400mf": 64, "resnet18": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64,
    "vgg11": 64, "vit_b_32": 224, "convnext_tiny": 64, "swin_t": 64,
}  # fmt: skip


def inputs_of(described: Sequence[Any]) -> Inputs:
    """Return a batch of 3."""
    every = [described] if described and all(type(each) is int for each in described) else described
    found = []
    for each in every:
        given = each if isinstance(each, dict) else {"shape": each}
        shape = (*((3,) if given.get("batched", True) else ()), *given["shape"])
        found.append(torch.randint(1, 3, shape) if "dtype" in given else torch.randn(shape))
    return tuple(found)


def total(output: Any) -> Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def assert_same(make: Callable[[], nn.Module], described: Sequence[Any], leaves: Sequence[str]) -> None:
    torch.manual_seed(0)
    base = make()
    torch.manual_seed(0)
    space = Space(make, inputs=described, leaves=leaves)
    prefix = "base." if "." in leaves else ""
    assert [prefix + name for name, _ in base.named_parameters()] == [name for name, _ in space.named_parameters()]
    torch.manual_seed(1)
    inputs = inputs_of(described)
    outputs = []
    for module in (base, space):
        torch.manual_seed(2)
        with torch.no_grad():
            outputs.append(module.eval()(*inputs))
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            total(module(*inputs)).backward()
            optimizer.step()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0, equal_nan=True)
    before, after = base.state_dict(), space.state_dict()
    assert [prefix + name for name in before] == list(after)
    for name, tensor in before.items():
        torch.testing.assert_close(tensor, after[prefix + name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OURS)
def test_of_ours(name: str) -> None:
    make, described, leaves = OURS[name]
    assert_same(make, described, leaves)


QUICK = ("squeezenet1_1", "mobilenet_v3_small")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OF_TORCHVISION]
)
def test_of_torchvision(name: str) -> None:
    size = OF_TORCHVISION[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(lambda: models.torchvision_model(name, 5), [3, size, size], ())
