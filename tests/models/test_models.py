import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.models import MLP, Linear, ResNet, SampleWeights, WeightNet, torchvision_model


@pytest.mark.parametrize("image_shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("build", [MLP, Linear, lambda shape, k: ResNet(8, k, shape, width=4)])
def test_classifiers_give_logits(image_shape: tuple[int, ...], build: type) -> None:
    assert build(image_shape, 7)(torch.randn(2, *image_shape)).shape == (2, 7)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (56, 0.85)])
def test_resnets_have_the_published_number_of_parameters(depth: int, millions: float) -> None:
    model = ResNet(depth, 10, (3, 32, 32))
    assert round(_num_parameters(model) / 1e6, 2) == millions
    num_layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    assert num_layers == depth


def test_resnet_shortcuts_pass_every_second_pixel_on() -> None:
    block = ResNet(8, 10, (3, 32, 32), width=4).stages[1][0]
    images = torch.randn(2, 4, 7, 7)
    shortcut = block._shortcut(images)
    assert shortcut.shape == block.convolution_1(images).shape == (2, 8, 4, 4)
    assert torch.equal(shortcut[:, 2:6], images[:, :, ::2, ::2])
    assert shortcut[:, :2].abs().sum() == shortcut[:, 6:].abs().sum() == 0


def test_resnet_depths_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"depth=18; expected 6n \+ 2.* Set depth=20\."):
        ResNet(18, 10, (3, 32, 32))


def test_mlp_has_the_layers_it_is_told() -> None:
    model = MLP((1, 8, 8), 10, hidden=[32, 16])
    assert _num_parameters(model) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10
    assert _num_parameters(MLP((5,), 3, hidden=[])) == 5 * 3 + 3


def test_weight_net_is_a_1_100_1_network_into_the_unit_interval() -> None:
    net = WeightNet()
    assert _num_parameters(net) == 301
    weight = net(torch.linspace(0, 20, 50)[:, None])
    assert weight.shape == (50, 1)
    assert ((weight > 0) & (weight < 1)).all()


def test_sample_weights_start_where_they_are_told() -> None:
    weights = SampleWeights(4, initial=0.2)
    torch.testing.assert_close(weights(torch.tensor([3, 0])), torch.tensor([0.2, 0.2]))
    with pytest.raises(ConfigError, match="initial=1"):
        SampleWeights(4, initial=1)


def test_torchvision_models_are_built_by_name() -> None:
    model = torchvision_model("squeezenet1_1", 7, image_shape=(3, 32, 32))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet_18"}, "name=resnet_18; .* Did you mean 'resnet18'"),
        ({"name": "inception_v3"}, "name=inception_v3; expected a classifier"),
        ({"name": "resnet18", "weights": "DEFAULT"}, "weights=DEFAULT; expected null"),
        ({"name": "resnet18", "image_shape": (1, 8, 8)}, r"1 channels; expected 3 \(RGB\)"),
    ],
)
def test_torchvision_models_that_cannot_be_had_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torchvision_model(num_classes=10, **options)
