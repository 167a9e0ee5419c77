"""Models that recipes search from, and what they may be made of, against a few lines of plain torch."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlotool.core import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.losses import shared_weight_accuracy
from mlotool.models import (
    InvertedResidual,
    InvertedResidualNetwork,
    SharedWeightNetwork,
    SharedWeightUnit,
    SqueezeExcitation,
    TextAttention,
    TextConvolution,
    TextNetwork,
    TextPooling,
    TextRecurrence,
    TwoBackNetwork,
    crossed_convolution,
)
from mlotool.models.shared_weight_network import ACTIVATIONS


def test_squeeze_and_excitation_scales_channels() -> None:
    module, x = SqueezeExcitation(8, 0.5), torch.randn(3, 8, 4, 4)
    hidden = F.relu(x.mean((2, 3)) @ module.squeeze.weight.T + module.squeeze.bias)
    scale = torch.sigmoid(hidden @ module.excite.weight.T + module.excite.bias)
    assert module.squeeze.out_features == 4
    assert torch.allclose(module(x), torch.einsum("bchw,bc->bchw", x, scale), atol=1e-6)


@pytest.mark.parametrize(("num_outputs", "stride", "is_residual"), [(4, 1, True), (6, 1, False), (4, 2, False)])
@pytest.mark.parametrize("expansion", [1, 3])
def test_inverted_residual(num_outputs: int, stride: int, is_residual: bool, expansion: int) -> None:
    block = InvertedResidual(4, num_outputs, stride, expansion, kernel_size=5, squeeze=0.25).eval()
    x = torch.randn(2, 4, 8, 8)
    features = block.project(block.squeeze(block.depthwise(block.expand(x))))
    assert torch.equal(block(x), x + features if is_residual else features)
    assert block(x).shape == (2, num_outputs, 8 // stride, 8 // stride)
    assert block.depthwise[0].groups == block.depthwise[0].in_channels == 4 * expansion


def test_inverted_residual_network_has_its_stages() -> None:
    network = InvertedResidualNetwork([3, 16, 16], 5, widths=(4, 6), strides=(2, 2), depths=(1, 3))
    assert [len(stage) for stage in network.stages] == [1, 3]
    assert [block.is_residual for block in network.stages[1]] == [False, True, True]
    assert network.stages(network.stem(torch.randn(2, 3, 16, 16))).shape == (2, 6, 4, 4)


def test_two_back_network_reads_the_two_blocks_before() -> None:
    network, x = TwoBackNetwork([1, 8, 8], 10, width=4).eval(), torch.randn(2, 1, 8, 8)
    stem = network.stem(x)
    results = [stem, stem]
    for latest, before, block in zip(network.latest, network.before, network.blocks, strict=True):
        one, two = latest(results[-1]), before(results[-2])
        results.append(block.separable(one) + block.skip(two))
    assert [each.shape[1:] for each in results] == [(4, 8, 8), (4, 8, 8), (4, 8, 8), (8, 4, 4), (8, 4, 4)]
    assert torch.equal(network(x), network.classifier(results[-1].mean((2, 3))))


@pytest.mark.parametrize("stride", [1, 2])
def test_crossed_convolution_sees_a_square(stride: int) -> None:
    module = crossed_convolution(4, stride, affine=True).eval()
    x = torch.randn(2, 4, 8, 8)
    assert module(x).shape == (2, 4, 8 // stride, 8 // stride)
    kernel = torch.einsum("omy,mix->oiyx", module[2].weight[..., 0], module[1].weight[:, :, 0])
    assert torch.allclose(module[:3](x), F.conv2d(F.relu(x), kernel, stride=stride, padding=1), atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [TextConvolution(8, 5), TextRecurrence(8), TextAttention(8, 2), TextPooling("max"), TextPooling("mean", 5)],
    ids=lambda module: type(module).__name__,
)
def test_text_operations_keep_the_shape(module: nn.Module) -> None:
    x = torch.randn(2, 7, 8, requires_grad=True)
    result = module(x)
    result.sum().backward()
    assert result.shape == x.shape
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_text_operations_compute_what_torch_computes() -> None:
    x = torch.randn(2, 7, 8)
    attention = TextAttention(8, 2)
    whole = nn.MultiheadAttention(8, 2, batch_first=True)
    whole.in_proj_weight.data, whole.in_proj_bias.data = (each.data for each in attention.query_key_value.parameters())
    whole.out_proj.load_state_dict(attention.output.state_dict())
    assert torch.allclose(attention(x), whole(x, x, x)[0], atol=1e-6)
    recurrence = TextRecurrence(8)
    both = recurrence.recurrence(x)[0]
    assert torch.allclose(recurrence(x), both[..., :8] + both[..., 8:], atol=1e-6)
    # A mean over three tokens, with zeros outside.
    padded = F.pad(x, [0, 0, 1, 1])
    assert torch.allclose(TextPooling("mean")(x), (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3, atol=1e-6)


def test_text_network_leaves_padding_out_of_the_mean() -> None:
    network = TextNetwork(20, 3, width=8, num_layers=1, kernel_size=1)
    one = torch.tensor([[4, 7, 9]])
    assert torch.allclose(network(one), network(F.pad(one, [0, 5])), atol=1e-6)
    assert network(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 3)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_units_share_their_weight(activation: str) -> None:
    values, weight = torch.randn(3, 5), torch.full((5, 1), 0.6)
    signals = [torch.cat([each[:, None], weight], dim=1) for each in values]
    result = SharedWeightUnit(activation)(*signals)
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
    network, x = SharedWeightNetwork([5], 2, num_hidden=3, weight=1.5), torch.randn(4, 5)
    hidden = [1.5 * (x[:, 0] + x[:, 3]), 1.5 * (x[:, 1] + x[:, 4]), 1.5 * x[:, 2]]
    expected = torch.stack([1.5 * (hidden[0] + hidden[2]), 1.5 * hidden[1]], dim=1)
    assert torch.allclose(network(x), expected, atol=1e-6)
    assert [name for name, _ in network.named_parameters()] == ["weight"]


def test_shared_weight_accuracy_leaves_the_weight_alone() -> None:
    network = SharedWeightNetwork([4], 2, weight=0.3)
    network.hidden[1] = SharedWeightUnit("absolute")
    batch = {"input": torch.randn(50, 4), "target": torch.randint(2, (50,))}
    found = shared_weight_accuracy(BoundModule(network), batch, [-1.0, 2.0])
    expected = {}
    for constant in (-1.0, 2.0):
        other = SharedWeightNetwork([4], 2, weight=constant)
        other.hidden[1] = SharedWeightUnit("absolute")
        expected[f"accuracy_at_{constant:g}"] = (other(batch["input"]).argmax(1) == batch["target"]).float().mean()
    assert found == {"shared_weight_accuracy": torch.stack(list(expected.values())).mean(), **expected}
    assert network.weight.item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (TextAttention, {"embed_dim": 6, "num_heads": 4}, "num_heads=4"),
        (TextPooling, {"kind": "sum"}, "expected max or mean"),
        (SharedWeightUnit, {"activation": "tan"}, "Did you mean 'tanh'"),
        (SharedWeightNetwork, {"image_shape": [4], "num_classes": 2, "num_hidden": 5}, "num_hidden=5"),
    ],
)
def test_settings_that_make_no_module(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)
