from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlotool import models
from mlotool.core import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.losses import shared_weight_accuracy
from mlotool.models.residual_network import ACTIVATIONS, smooth_relu
from mlotool.models.shared_weight_network import ACTIVATIONS as UNIT_ACTIVATIONS


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("widen_factor", "depth", "millions"),
    [(None, 20, 0.27), (None, 32, 0.46), (None, 56, 0.85), (4, 40, 8.9), (8, 16, 11.0), (10, 28, 36.5), (10, 40, 55.8)],
)
def test_resnets_have_the_published_number_of_parameters(widen_factor: int | None, depth: int, millions: float) -> None:
    shape = (3, 32, 32)
    with torch.device("meta"):
        model = (
            models.ResNet(depth, 10, shape)
            if widen_factor is None
            else models.WideResNet(depth, widen_factor, 10, shape)
        )
    assert _num_parameters(model) / 1e6 == pytest.approx(millions, abs=0.005 if widen_factor is None else 0.05)
    num_layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    # The paper of wide ones counts convolutions, those of shortcuts too; the last layer is one more.
    assert num_layers == depth + (widen_factor is not None)


def test_resnet_shortcuts_pass_every_second_pixel_on() -> None:
    block = models.ResNet(8, 10, (3, 32, 32), width=4).stages[1][0]
    images = torch.randn(2, 4, 7, 7)
    shortcut = block._shortcut(images)
    assert shortcut.shape == block.convolution_1(images).shape == (2, 8, 4, 4)
    assert torch.equal(shortcut[:, 2:6], images[:, :, ::2, ::2])
    assert shortcut[:, :2].abs().sum() == shortcut[:, 6:].abs().sum() == 0


def test_weight_net_is_a_1_100_1_network_into_the_unit_interval() -> None:
    net = models.WeightNet()
    assert _num_parameters(net) == 301
    weight = net(torch.linspace(0, 20, 50)[:, None])
    assert weight.shape == (50, 1)
    assert ((weight > 0) & (weight < 1)).all()


def test_sample_weights_start_where_they_are_told() -> None:
    weights = models.SampleWeights(4, initial=0.2)
    torch.testing.assert_close(weights(torch.tensor([3, 0])), torch.tensor([0.2, 0.2]))


def test_anchored_remembers_its_start() -> None:
    layer = nn.Linear(3, 2)
    first = [tensor.detach().clone() for tensor in layer.parameters()]
    anchored = models.Anchored(layer)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert all(map(torch.equal, anchored.start(), first))
    assert [name for name, _ in anchored.named_parameters()] == ["module.weight", "module.bias"]
    x = torch.randn(4, 3)
    assert torch.equal(anchored(x), layer(x))
    # A resumed run keeps the first start.
    other = models.Anchored(nn.Linear(3, 2))
    other.load_state_dict(anchored.state_dict())
    assert all(map(torch.equal, other.start(), first))


def test_positive_vectors_start_where_they_are_told_and_stay_positive() -> None:
    vector = models.PositiveVector(3, initial=0.2)
    torch.testing.assert_close(vector(), torch.full((3,), 0.2))
    with torch.no_grad():
        vector.logarithm.sub_(20.0)
    assert (vector() > 0).all()


def test_torchvision_parameters_come_from_a_file_but_for_the_last_layer(tmp_path: Path) -> None:
    given = models.torchvision_model("squeezenet1_1", 5)
    torch.save(given.state_dict(), tmp_path / "given.pth")
    model = models.torchvision_model("squeezenet1_1", 7, parameters_file=str(tmp_path / "given.pth"))
    expected, found = given.state_dict(), model.state_dict()
    assert {key for key in found if not torch.equal(found[key], expected[key])} == {
        "classifier.1.weight",
        "classifier.1.bias",
    }
    with pytest.raises(ConfigError, match=r"expected all tensors of resnet18 but the last layer"):
        models.torchvision_model("resnet18", 7, parameters_file=str(tmp_path / "given.pth"))
    (tmp_path / "bad.pth").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"bad\.pth could not be read"):
        models.torchvision_model("squeezenet1_1", 7, parameters_file=str(tmp_path / "bad.pth"))


def test_perturbations_stay_within_the_radius_and_end_at_the_last_sample() -> None:
    perturbation = models.BoundedPerturbation([1, 3, 3], num_samples=4, radius=0.5, start="random")
    change = perturbation(torch.tensor([3, 4, 0, 9]))
    assert change.shape == (4, 1, 3, 3)
    assert change[[1, 3]].abs().sum() == 0
    size = change[[0, 2]].abs()
    assert (size <= 0.5).all() and (size > 0.49).all()
    perturbation = models.BoundedPerturbation([2], num_samples=2, radius=0.5)
    change = perturbation(torch.tensor([0, 1]))
    assert change.abs().sum() == 0
    change.sum().backward()
    torch.testing.assert_close(perturbation.raw.grad, torch.full((2, 2), 0.5))


def test_corrected_labels_are_distributions_between_given_and_predicted() -> None:
    torch.manual_seed(0)
    corrector = models.LabelCorrector(4, 3)
    features, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    corrected, trust = corrector(features, target), corrector.trust(features, target)[:, None]
    torch.testing.assert_close(corrected.sum(dim=1), torch.ones(5))
    predicted = corrector.predict(features).softmax(dim=1)
    torch.testing.assert_close(corrected, trust * torch.eye(3)[target] + (1 - trust) * predicted)
    corrector = models.LabelCorrector(4, 3, initial_trust=0.9)
    torch.nn.init.zeros_(corrector.trust_output.weight)
    torch.testing.assert_close(corrector.trust(features, target), torch.full((5,), 0.9))


@pytest.mark.parametrize(
    ("model", "width"), [(models.MLP([3, 8, 8], 10, [16, 12]), 12), (models.ResNet(8, 10, [3, 8, 8], width=4), 16)]
)
def test_features_are_what_the_last_layer_reads(model: torch.nn.Module, width: int) -> None:
    images = torch.randn(4, 3, 8, 8)
    features, logits = model.eval().features_and_logits(images)
    assert features.shape == (4, width)
    torch.testing.assert_close(logits, model(images))


OPERATIONS = (
    *("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect"),
    *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
)


@pytest.mark.parametrize("size", [2, 7, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_width_and_take_the_stride(name: str, affine: bool, stride: int, size: int) -> None:
    module = models.operation(name, 4, stride, affine=affine)
    images = torch.randn(3, 4, size, size)
    assert module(images).shape == (3, 4, -(-size // stride), -(-size // stride))
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
    assert all(each.affine is affine for each in norms)


def test_a_halving_connection_reads_every_pixel() -> None:
    module = models.operation("skip_connect", 2, 2, affine=False).eval()
    images = torch.rand(1, 2, 4, 4, requires_grad=True)
    module(images).abs().sum().backward()
    # One half reads the pixels with even coordinates, the other those with odd ones, as in the published code.
    read = images.grad.ne(0).any(dim=1)[0]
    assert read.tolist() == [
        [(row + column) % 2 == 0 and row % 2 == column % 2 for column in range(4)] for row in range(4)
    ]


def test_a_cell_has_14_edges_and_the_network_two_reductions() -> None:
    network = models.CellNetwork([3, 32, 32], 10, width=4, num_cells=8, affine=False)
    assert [number for number, cell in enumerate(network.cells) if hasattr(cell, "reduction")] == [2, 5]
    assert len(network.cells[0].normal) == len(network.cells[2].reduction) == 14
    assert all(not m.affine for m in network.cells.modules() if isinstance(m, nn.BatchNorm2d))


def probabilities(edges: list[list[float]], kind: str = "normal") -> dict[str, torch.Tensor]:
    return {f"{kind}_{number}": torch.tensor(edge).softmax(0) for number, edge in enumerate(edges)}


def test_the_strongest_edges_are_kept_and_none_never_is() -> None:
    logits = torch.zeros(5, 8)  # node 2 reads 0 and 1; node 3 reads 0, 1 and 2
    logits[0, 4], logits[1, 0], logits[1, 3] = 2.0, 9.0, 1.0
    logits[2, 0], logits[3, 1], logits[4, 7] = 9.0, 1.0, 2.0
    given = probabilities(logits.tolist()) | probabilities(logits[:2].tolist(), "reduction")
    found = models.StrongestEdges()(dict.fromkeys(given, OPERATIONS), given)
    assert list(found.values()) == [
        *("sep_conv_3x3", "skip_connect"),
        *("none", "max_pool_3x3", "dil_conv_5x5"),
        *("sep_conv_3x3", "skip_connect"),
    ]
    assert list(found) == list(given)


def _sigma(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) <= 0.1, 2.5 * x**2 + x / 2 + 1 / 40, np.maximum(x, 0))


def test_smooth_relu_is_the_papers_and_has_a_continuous_derivative() -> None:
    x = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64, requires_grad=True)
    np.testing.assert_allclose(smooth_relu(x).detach().numpy(), _sigma(x.detach().numpy()), atol=1e-16)
    assert torch.autograd.gradcheck(smooth_relu, x[::25])
    slope = torch.autograd.grad(smooth_relu(x).sum(), x)[0]
    assert slope.diff().abs().max() <= 5 * 1e-3 * (1 + 1e-9)  # its second derivative is 5 or 0


def _layers(kernel_size: int | None, activation: str = "smooth_relu") -> models.ResidualLayers:
    layers = models.ResidualLayers(6, 4, final_time=1.5, kernel_size=kernel_size, activation=activation).double()
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
    state = expected = torch.randn(2, 4, *([] if kernel_size is None else [5, 5]), dtype=torch.float64)
    for n in range(layers.num_layers):
        expected = layers.layer(expected, n)
    assert torch.equal(layers(state), expected)
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


def test_layers_can_start_alike() -> None:
    equal = models.ResidualLayers(5, 8, equal_start=True)
    assert (equal.weight == equal.weight[0]).all()
    apart = models.ResidualLayers(200, 8, initial_scale=0.5)
    assert float(apart.weight.detach().std()) == pytest.approx(0.5 / 8**0.5, rel=0.05)


def test_the_networks_are_opening_layers_and_classifier() -> None:
    dense = models.DenseResidualNetwork([2], 5, num_layers=4, width=3, final_time=2.0).double()
    inputs = torch.randn(7, 2, dtype=torch.float64)
    opened = _sigma(inputs.numpy() @ dense.opening[1].weight.detach().numpy().T)
    features = dense.layers(torch.from_numpy(opened))
    torch.testing.assert_close(dense(inputs), dense.classifier(features))
    assert dense.features_and_logits(inputs)[0].shape == (7, 3)
    assert dense.layers.h == 0.5

    spectral = models.DenseResidualNetwork([6], 5, num_layers=4, width=6, opening="identity")
    assert torch.equal(spectral.opening(torch.ones(2, 6)), torch.ones(2, 6))

    images = torch.randn(2, 3, 4, 4)
    network = models.ConvolutionalResidualNetwork([3, 4, 4], 10, num_layers=2, channels=6)
    assert torch.equal(network.opening(images), torch.cat([images, images], dim=1))
    assert network(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.ResidualLayers(4, 8, kernel_size=2), "kernel_size: found 2; expected an odd number"),
        (lambda: models.DenseResidualNetwork([4], 5, width=8, opening="identity"), "Set width=4"),
        (
            lambda: models.ConvolutionalResidualNetwork([3, 8, 8], 5, channels=8),
            "channels: found 8; expected a multiple",
        ),
        (lambda: models.WideResNet(20, 1, 10, (3, 8, 8)), r"depth: found 20; expected 6n \+ 4"),
        (lambda: models.SampleWeights(4, initial=1), "initial: found 1"),
        (lambda: models.PositiveVector(initial=float("nan")), "PositiveVector.*: found"),
        (lambda: models.LabelCorrector(4, 3, initial_trust=1), "initial_trust: found 1"),
        *(
            (partial(models.torchvision_model, num_classes=10, **options), message)
            for options, message in (
                ({"name": "resnet_18"}, "name: found 'resnet_18'; .* Did you mean 'resnet18'"),
                ({"name": "inception_v3"}, "name: found 'inception_v3'; expected a classifier"),
                ({"name": "resnet18", "weights": "DEFAULT"}, "weights: found 'DEFAULT'; expected null"),
                ({"name": "resnet18", "image_shape": (1, 8, 8)}, r"expected 3 channels \(RGB\)"),
            )
        ),
    ],
)
def test_networks_that_cannot_be_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_wide_blocks_normalise_before_they_convolve() -> None:
    block = models.WideResNet(10, 2, 7, (3, 8, 8), width=4).eval().stages[1][0]
    images = torch.randn(2, 8, 8, 8)
    active = torch.relu(block.norm_1(images))
    residual = block.convolution_2(torch.relu(block.norm_2(block.convolution_1(active))))
    torch.testing.assert_close(block(images), block.shortcut(active) + residual)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_an_expanded_resnet18_has_the_shapes_of_a_resnet50(num_stages: int) -> None:
    with torch.device("meta"):
        images = torch.randn(2, 3, 32, 32)
        small = models.ExpandedResNet18(5, (3, 32, 32), num_stages=num_stages)
        large = models.torchvision_model("resnet50", 5, (3, 32, 32))
    names = ("conv1", "bn1", "relu", "maxpool", *(f"layer{stage + 1}" for stage in range(num_stages)))
    beginning = nn.Sequential(*(large.get_submodule(name) for name in names))
    assert small.expansion(small.stages(small.stem(images))).shape == beginning(images).shape
    assert small(images).shape == (2, 5)


def test_squeeze_and_excitation_scales_channels() -> None:
    module, x = models.SqueezeExcitation(8, 0.5), torch.randn(3, 8, 4, 4)
    hidden = F.relu(x.mean((2, 3)) @ module.squeeze.weight.T + module.squeeze.bias)
    scale = torch.sigmoid(hidden @ module.excite.weight.T + module.excite.bias)
    assert module.squeeze.out_features == 4
    assert torch.allclose(module(x), torch.einsum("bchw,bc->bchw", x, scale), atol=1e-6)


@pytest.mark.parametrize(("num_outputs", "stride", "is_residual"), [(4, 1, True), (6, 1, False), (4, 2, False)])
@pytest.mark.parametrize("expansion", [1, 3])
def test_inverted_residual(num_outputs: int, stride: int, is_residual: bool, expansion: int) -> None:
    block = models.InvertedResidual(4, num_outputs, stride, expansion, kernel_size=5, squeeze=0.25).eval()
    x = torch.randn(2, 4, 8, 8)
    features = block.project(block.squeeze(block.depthwise(block.expand(x))))
    assert torch.equal(block(x), x + features if is_residual else features)
    assert block(x).shape == (2, num_outputs, 8 // stride, 8 // stride)
    assert block.depthwise[0].groups == block.depthwise[0].in_channels == 4 * expansion


def test_two_back_network_reads_the_two_blocks_before() -> None:
    network, x = models.TwoBackNetwork([1, 8, 8], 10, width=4).eval(), torch.randn(2, 1, 8, 8)
    stem = network.stem(x)
    results = [stem, stem]
    for latest, before, block in zip(network.latest, network.before, network.blocks, strict=True):
        one, two = latest(results[-1]), before(results[-2])
        results.append(block.separable(one) + block.skip(two))
    assert [each.shape[1:] for each in results] == [(4, 8, 8), (4, 8, 8), (4, 8, 8), (8, 4, 4), (8, 4, 4)]
    assert torch.equal(network(x), network.classifier(results[-1].mean((2, 3))))


@pytest.mark.parametrize("stride", [1, 2])
def test_crossed_convolution_sees_a_square(stride: int) -> None:
    module = models.crossed_convolution(4, stride, affine=True).eval()
    x = torch.randn(2, 4, 8, 8)
    assert module(x).shape == (2, 4, 8 // stride, 8 // stride)
    kernel = torch.einsum("omy,mix->oiyx", module[2].weight[..., 0], module[1].weight[:, :, 0])
    assert torch.allclose(module[:3](x), F.conv2d(F.relu(x), kernel, stride=stride, padding=1), atol=1e-5)


def test_text_operations_compute_what_torch_computes() -> None:
    x = torch.randn(2, 7, 8)
    attention = models.TextAttention(8, 2)
    whole = nn.MultiheadAttention(8, 2, batch_first=True)
    whole.in_proj_weight.data, whole.in_proj_bias.data = (each.data for each in attention.query_key_value.parameters())
    whole.out_proj.load_state_dict(attention.output.state_dict())
    assert torch.allclose(attention(x), whole(x, x, x)[0], atol=1e-6)
    recurrence = models.TextRecurrence(8)
    both = recurrence.recurrence(x)[0]
    assert torch.allclose(recurrence(x), both[..., :8] + both[..., 8:], atol=1e-6)
    # A mean over three tokens, with zeros outside.
    padded = F.pad(x, [0, 0, 1, 1])
    assert torch.allclose(
        models.TextPooling("mean")(x), (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3, atol=1e-6
    )


@pytest.mark.parametrize("activation", list(UNIT_ACTIVATIONS))
def test_units_share_their_weight(activation: str) -> None:
    values, weight = torch.randn(3, 5), torch.full((5, 1), 0.6)
    signals = [torch.cat([each[:, None], weight], dim=1) for each in values]
    result = models.SharedWeightUnit(activation)(*signals)
    own: dict[str, Any] = {
        "linear": lambda x: x,
        "gaussian": lambda x: torch.exp(-x.square() / 2),
        "sine": torch.sin,
        "cosine": torch.cos,
        "absolute": torch.abs,
        "inverse": lambda x: -x,
        "step": lambda x: (x > 0).float(),
    }
    function = own.get(activation) or getattr(torch, activation)
    assert torch.allclose(result, torch.cat([function(0.6 * values.sum(0))[:, None], weight], dim=1), atol=1e-6)


def test_shared_weight_network_is_quadratic_in_its_weight_at_first() -> None:
    network, x = models.SharedWeightNetwork([5], 2, num_hidden=3, weight=1.5), torch.randn(4, 5)
    hidden = [1.5 * (x[:, 0] + x[:, 3]), 1.5 * (x[:, 1] + x[:, 4]), 1.5 * x[:, 2]]
    expected = torch.stack([1.5 * (hidden[0] + hidden[2]), 1.5 * hidden[1]], dim=1)
    assert torch.allclose(network(x), expected, atol=1e-6)
    assert [name for name, _ in network.named_parameters()] == ["weight"]


def test_shared_weight_accuracy_leaves_the_weight_alone() -> None:
    network = models.SharedWeightNetwork([4], 2, weight=0.3)
    network.hidden[1] = models.SharedWeightUnit("absolute")
    batch = {"input": torch.randn(50, 4), "target": torch.randint(2, (50,))}
    found = shared_weight_accuracy(BoundModule(network), batch, [-1.0, 2.0])
    expected = {}
    for constant in (-1.0, 2.0):
        other = models.SharedWeightNetwork([4], 2, weight=constant)
        other.hidden[1] = models.SharedWeightUnit("absolute")
        expected[f"accuracy_at_{constant:g}"] = (other(batch["input"]).argmax(1) == batch["target"]).float().mean()
    assert found == {"shared_weight_accuracy": torch.stack(list(expected.values())).mean(), **expected}
    assert network.weight.item() == pytest.approx(0.3)
