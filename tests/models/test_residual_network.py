"""Residual layers against loops written out, their networks, wide residual networks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.models import (
    ConvolutionalResidualNetwork,
    DenseResidualNetwork,
    ExpandedResNet18,
    ResidualLayers,
    WideResNet,
    torchvision_model,
)
from mlotool.models.residual_network import ACTIVATIONS, smooth_relu


def _sigma(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) <= 0.1, 2.5 * x**2 + x / 2 + 1 / 40, np.maximum(x, 0))


def test_smooth_relu_is_the_papers_and_has_a_continuous_derivative() -> None:
    x = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64, requires_grad=True)
    np.testing.assert_allclose(smooth_relu(x).detach().numpy(), _sigma(x.detach().numpy()), atol=1e-16)
    assert torch.autograd.gradcheck(smooth_relu, x)
    slope = torch.autograd.grad(smooth_relu(x).sum(), x)[0]
    assert slope.diff().abs().max() <= 5 * 1e-3 * (1 + 1e-9)  # its second derivative is 5 or 0


def _layers(kernel_size: int | None, activation: str = "smooth_relu") -> ResidualLayers:
    layers = ResidualLayers(6, 4, final_time=1.5, kernel_size=kernel_size, activation=activation).double()
    nn.init.normal_(layers.bias)
    return layers


def test_dense_layers_are_euler_steps() -> None:
    layers = _layers(None)
    state = torch.randn(3, 4, dtype=torch.float64)
    expected = state.numpy()
    for weight, bias in zip(layers.weight.detach().numpy(), layers.bias.detach().numpy(), strict=True):
        expected = expected + 0.25 * _sigma(expected @ weight.T + bias)
    np.testing.assert_allclose(layers(state).detach().numpy(), expected, rtol=1e-13, atol=1e-14)


def test_convolutions_are_sums_over_neighbours() -> None:
    layers = _layers(3, "tanh")
    state = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    padded = np.pad(state.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    weight = layers.weight[0].detach().numpy()
    total = sum(
        np.einsum("oc,bchw->bohw", weight[:, :, i, j], padded[:, :, i : i + 5, j : j + 6])
        for i in range(3)
        for j in range(3)
    )
    expected = state.numpy() + 0.25 * np.tanh(total + layers.bias[0].detach().numpy()[:, None, None])
    np.testing.assert_allclose(layers.layer(state, 0).detach().numpy(), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kernel_size", [None, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_many_layers_at_once_are_those_one_by_one(kernel_size: int | None, activation: str) -> None:
    layers = _layers(kernel_size, activation)
    chosen = range(1, 6, 2)
    states = torch.randn(3, 2, 4, *([] if kernel_size is None else [5, 5]), dtype=torch.float64, requires_grad=True)
    one_by_one = torch.stack([layers.layer(state, n, 0.75) for state, n in zip(states, chosen, strict=True)])
    at_once = layers.many(states, chosen, 0.75)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-12, atol=1e-12)
    inputs = [states, *layers.parameters()]
    for found, expected in zip(
        torch.autograd.grad(at_once.sin().sum(), inputs),
        torch.autograd.grad(one_by_one.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_the_layers_of_a_run_are_its_steps() -> None:
    layers = _layers(3)
    state = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    expected = state
    for n in range(layers.num_layers):
        expected = layers.layer(expected, n)
    assert torch.equal(layers(state), expected)


def test_layers_can_start_alike() -> None:
    equal = ResidualLayers(5, 8, equal_start=True)
    assert (equal.weight == equal.weight[0]).all()
    apart = ResidualLayers(200, 8, initial_scale=0.5)
    assert float(apart.weight.detach().std()) == pytest.approx(0.5 / 8**0.5, rel=0.05)


def test_the_networks_are_opening_layers_and_classifier() -> None:
    dense = DenseResidualNetwork([2], 5, num_layers=4, width=3, final_time=2.0).double()
    inputs = torch.randn(7, 2, dtype=torch.float64)
    opened = _sigma(inputs.numpy() @ dense.opening[1].weight.detach().numpy().T)
    features = dense.layers(torch.from_numpy(opened))
    torch.testing.assert_close(dense(inputs), dense.classifier(features))
    assert dense.features_and_logits(inputs)[0].shape == (7, 3)
    assert dense.layers.h == 0.5

    spectral = DenseResidualNetwork([6], 5, num_layers=4, width=6, opening="identity")
    assert torch.equal(spectral.opening(torch.ones(2, 6)), torch.ones(2, 6))

    images = torch.randn(2, 3, 4, 4)
    network = ConvolutionalResidualNetwork([3, 4, 4], 10, num_layers=2, channels=6)
    assert torch.equal(network.opening(images), torch.cat([images, images], dim=1))
    assert network(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ResidualLayers(4, 8, kernel_size=2), "kernel_size=2; expected an odd number"),
        (lambda: ResidualLayers(4, 8, activation="tahn"), "Did you mean 'tanh'"),
        (lambda: DenseResidualNetwork([4], 5, width=8, opening="identity"), "Set width=4"),
        (lambda: DenseResidualNetwork([4], 5, opening="none"), "opening=none; expected dense or identity"),
        (lambda: ConvolutionalResidualNetwork([3, 8, 8], 5, channels=8), r"channels=8; .* Set channels=9\."),
        (lambda: WideResNet(20, 1, 10, (3, 8, 8)), r"depth=20; expected 6n \+ 4.* Set depth=22\."),
    ],
)
def test_networks_that_cannot_be_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("depth", "widen_factor", "millions"), [(40, 4, 8.9), (16, 8, 11.0), (28, 10, 36.5), (40, 10, 55.8)]
)
def test_wide_resnets_have_the_published_number_of_parameters(depth: int, widen_factor: int, millions: float) -> None:
    with torch.device("meta"):
        model = WideResNet(depth, widen_factor, 10, (3, 32, 32))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions
    # The paper counts convolutions, those of shortcuts too; the last layer is one more.
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth + 1


def test_wide_blocks_normalise_before_they_convolve() -> None:
    model = WideResNet(10, 2, 7, (3, 8, 8), width=4).eval()
    block = model.stages[1][0]
    images = torch.randn(2, 8, 8, 8)
    active = torch.relu(block.norm_1(images))
    residual = block.convolution_2(torch.relu(block.norm_2(block.convolution_1(active))))
    torch.testing.assert_close(block(images), block.shortcut(active) + residual)
    assert residual.shape == (2, 16, 4, 4)
    assert all(block.shortcut is None for block in model.stages[1][1:])
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 7)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_an_expanded_resnet18_has_the_shapes_of_a_resnet50(num_stages: int) -> None:
    images = torch.randn(2, 3, 32, 32)
    small = ExpandedResNet18(5, (3, 32, 32), num_stages=num_stages)
    large = torchvision_model("resnet50", 5, (3, 32, 32))
    names = ("conv1", "bn1", "relu", "maxpool", *(f"layer{stage + 1}" for stage in range(num_stages)))
    beginning = nn.Sequential(*(large.get_submodule(name) for name in names))
    assert small.expansion(small.stages(small.stem(images))).shape == beginning(images).shape
    assert small(images).shape == (2, 5)
    with pytest.raises(ConfigError, match="num_stages=5; expected 1, 2, 3 or 4"):
        ExpandedResNet18(5, num_stages=5)
