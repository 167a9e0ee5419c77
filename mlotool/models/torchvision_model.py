"""Any classifier of torchvision, untrained."""

from collections.abc import Sequence

from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean

# These two return more than logits while they train.
_UNSUITABLE = ("googlenet", "inception_v3")


def torchvision_model(
    name: str, num_classes: int, image_shape: Sequence[int] = (3, 224, 224), weights: str | None = None
) -> nn.Module:
    """Build a torchvision classifier by its name, with random weights.

    Args:
        name: as in `torchvision.models`, such as `resnet18` or `mobilenet_v3_small`.
        num_classes: k.
        image_shape: (3, h, w) of the data; torchvision's models read RGB images, most of them down to 32 x 32.
        weights: must be None: pretrained weights are a download, and a recipe may not start one.

    Returns:
        A module that maps images (b, 3, h, w) to logits (b, k).

    Raises:
        ConfigError: torchvision has no such classifier, the images are not RGB, or `weights` is given.

    Example:
        >>> torchvision_model("squeezenet1_1", 10).num_classes
        10
    """
    if weights is not None:
        raise ConfigError(
            f"torchvision_model: weights={weights}; expected null, as a recipe may not download. Take weights out; "
            "load a checkpoint of yours in a module of your own."
        )
    if image_shape[0] != 3:
        raise ConfigError(
            f"torchvision_model: {name} for images with {image_shape[0]} channels; expected 3 (RGB). "
            "Use data=cifar10, or a model of mlotool's own such as resnet20."
        )
    from torchvision import models  # takes a second to import

    names = [option for option in models.list_models(module=models) if option not in _UNSUITABLE]
    if name not in names:
        raise ConfigError(
            f"torchvision_model: name={name}; expected a classifier of torchvision.{did_you_mean(name, names)} "
            "Set name=resnet18, or another name that torchvision.models.list_models() gives."
        )
    return models.get_model(name, weights=None, num_classes=num_classes)
