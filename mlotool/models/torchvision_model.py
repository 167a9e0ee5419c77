"""Any classifier of torchvision, untrained or with parameters from a file."""

from pickle import UnpicklingError
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import Count, Shape, target
from mlotool.folders.files import at_home

# These two return more than logits while they train.
_UNSUITABLE = ("googlenet", "inception_v3")


@target("module")
def torchvision_model(
    name: str,
    num_classes: Count,
    image_shape: Shape = (3, 224, 224),
    weights: str | None = None,
    parameters_file: str | None = None,
) -> nn.Module:
    """Build a torchvision classifier by its name, with random weights or with weights from a local file.

    Args:
        name: as in `torchvision.models`, such as `resnet18` or `mobilenet_v3_small`.
        num_classes: k.
        image_shape: (3, h, w) of the data; torchvision's models read RGB images, most of them down to 32 x 32.
        weights: must be None: pretrained weights would be downloaded, which a recipe is not allowed to start.
        parameters_file: path of a state dict, such as torchvision's published resnet18-f37072fd.pth; only tensors are
            read from it (`weights_only`). Parameters that have another shape in the network, such as the last layer for
            another number of classes, stay random.

    Returns:
        A module that maps images (b, 3, h, w) to logits (b, k).

    Raises:
        ConfigError: torchvision has no such classifier, the images are not RGB, `weights` is given, or the file
            does not fit.

    Example:
        >>> torchvision_model("squeezenet1_1", 10).num_classes
        10
    """
    expected = "null, as a recipe may not download"
    require(weights is None, "weights", weights, expected, "Give parameters_file, a checkpoint of yours.")
    advice = "Use data=cifar10, or a model of mlotool's own such as resnet20."
    require(image_shape[0] == 3, "image_shape", list(image_shape), "3 channels (RGB)", advice)
    from torchvision import models  # takes a second to import

    names = [option for option in models.list_models(module=models) if option not in _UNSUITABLE]
    advice = f"{did_you_mean(name, names)} Give a name of torchvision.models.list_models().".strip()
    require(name in names, "name", name, "a classifier of torchvision", advice)
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes)
    if parameters_file is not None:
        _load(model, name, parameters_file)
    return model


def _load(model: nn.Module, name: str, file: str) -> None:
    own = model.state_dict()
    try:
        saved = torch.load(at_home(file), map_location="cpu", weights_only=True)
        fitting = {key: value for key, value in saved.items() if key in own and value.shape == own[key].shape}
    except (OSError, RuntimeError, EOFError, AttributeError, UnpicklingError) as error:
        raise ConfigError(
            f"torchvision_model: parameters_file={file} could not be read ({str(error).splitlines()[0]}); expected a "
            f"state dict of {name}. Download it yourself, and give its path on the command line."
        ) from error
    # All but one layer's weight and bias.
    expected = f"all tensors of {name} but the last layer's, of which it has {len(fitting)} of {len(own)}"
    require(len(fitting) >= len(own) - 2, "parameters_file", file, expected)
    model.load_state_dict(own | fitting)


# b: batch, k: classes


@target("module")
class ExpandedResNet18(nn.Module):
    """The first stages of torchvision's ResNet-18, a 1 x 1 convolution to four times the channels, and a classifier.

    A stage of ResNet-50 has four times as many channels as the same stage of ResNet-18. After the convolution, the
    state has the shape that it has in a ResNet-50 after these stages. So this network can be the auxiliary network
    (`parallel.auxnet`) of a ResNet-50 that is cut there.

    Args:
        num_classes: k.
        image_shape: (3, h, w).
        num_stages: number of stages of ResNet-18 before the convolution, 1 to 4.

    Raises:
        ConfigError: another number of stages, or images that are not RGB.

    Source: He et al. 2016, Deep Residual Learning for Image Recognition, table 1. Sun et al. 2021 (arXiv 2112.05387),
    section 5.2, has ResNet-18 as the auxiliary network of a ResNet-50 and does not say how the widths are matched.

    Example:
        >>> import torch
        >>> model = ExpandedResNet18(10, [3, 64, 64], num_stages=2)
        >>> model.expansion(model.stages(model.stem(torch.zeros(1, 3, 64, 64)))).shape
        torch.Size([1, 512, 8, 8])
    """

    def __init__(
        self, num_classes: Count, image_shape: Shape = (3, 224, 224), num_stages: Annotated[int, Ge(1), Le(4)] = 3
    ) -> None:
        super().__init__()
        resnet = torchvision_model("resnet18", num_classes, image_shape)
        stem = [resnet.get_submodule(name) for name in ("conv1", "bn1", "relu", "maxpool")]
        width = 64 * 2 ** (num_stages - 1)
        self.stem = nn.Sequential(*stem)
        self.stages = nn.Sequential(*(resnet.get_submodule(f"layer{stage + 1}") for stage in range(num_stages)))
        self.expansion = nn.Sequential(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU())
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, 3, h, w)."""
        return self.classifier(self.expansion(self.stages(self.stem(images))))
