"""A ResNet-18 whose states have the shapes of a ResNet-50's: a small network that can stand in for its beginning."""

from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor, nn

from mlotool.core.settings import Count, Shape, target
from mlotool.models.torchvision_model import torchvision_model

# b: batch, k: classes


@target("module")
class ExpandedResNet18(nn.Module):
    """The first stages of torchvision's ResNet-18, a 1 x 1 convolution to four times the channels, and a classifier.

    A stage of ResNet-50 has four times as many channels as the same stage of ResNet-18. After the convolution the
    state has the shape that a ResNet-50 has there, as the auxiliary network of a ResNet-50 that is cut there needs it.

    Args:
        num_classes: k.
        image_shape: (3, h, w).
        num_stages: of ResNet-18, 1 to 4, before the convolution.

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
