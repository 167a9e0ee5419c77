"""Wide residual networks: few layers with many channels, pre-activation blocks."""

import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.settings import BelowOne, Count, Layers, Shape, target
from mlotool.models.resnet import num_blocks

# b: batch, c: channels, h, w: height and width, k: classes


@target("module")
class WideResNet(nn.Module):
    """A wide residual network of depth 6n + 4: three stages of n blocks with 16 f, 32 f and 64 f channels.

        x <- shortcut(x) + conv(relu(norm(conv(relu(norm(x))))))      (each block)

    Norm and ReLU come before the convolutions. Where the shape changes, the shortcut is a 1 x 1 convolution of the
    normalised input. The second and the third stage halve the image.

    Args:
        depth: 6n + 4: 10, 16, 22, 28, 40, ...
        widen_factor: f.
        num_classes: k.
        image_shape: (c, h, w); only c matters.
        width: channels before the first stage, 16; the stages have f, 2 f and 4 f times as many.
        dropout: share of channels' entries dropped between the two convolutions of a block.

    Raises:
        ConfigError: `depth` is not of the form 6n + 4.

    Source: Zagoruyko and Komodakis 2016, Wide Residual Networks (arXiv 1605.07146), table 1: 36.5 million parameters
    for 28-10 and ten classes. Sun et al. 2021 (arXiv 2112.05387), section 5.2, trains 40-10 with 28-10 and 16-10.

    Example:
        >>> import torch
        >>> WideResNet(10, 1, 10, [3, 32, 32])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: Layers,
        widen_factor: Layers,
        num_classes: Count,
        image_shape: Shape,
        width: Count = 16,
        dropout: BelowOne = 0.0,
    ) -> None:
        super().__init__()
        length = num_blocks(depth, 4)
        widths = [width, *(factor * widen_factor * width for factor in (1, 2, 4))]
        self.convolution = nn.Conv2d(image_shape[0], width, kernel_size=3, padding=1, bias=False)
        self.stages = nn.Sequential(
            *(
                _stage(widths[number], widths[number + 1], length, stride, dropout)
                for number, stride in enumerate((1, 2, 2))
            )
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.classifier = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        return self.features_and_logits(images)[1]

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the last layer reads (b, 4 f width), and the logits (b, k)."""
        features = F.relu(self.norm(self.stages(self.convolution(images)))).mean(dim=(2, 3))
        return features, self.classifier(features)


class _Block(nn.Module):
    """Two 3 x 3 convolutions, each after norm and ReLU, and the shortcut around them."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.BatchNorm2d(num_inputs)
        self.convolution_1 = nn.Conv2d(num_inputs, num_outputs, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(num_outputs)
        self.dropout = nn.Dropout(dropout)
        self.convolution_2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        keeps_shape = stride == 1 and num_inputs == num_outputs
        self.shortcut = None if keeps_shape else nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        active = F.relu(self.norm_1(images))
        residual = self.dropout(F.relu(self.norm_2(self.convolution_1(active))))
        shortcut = images if self.shortcut is None else self.shortcut(active)
        return shortcut + self.convolution_2(residual)


def _stage(num_inputs: int, num_outputs: int, num_blocks: int, stride: int, dropout: float) -> nn.Sequential:
    blocks = [_Block(num_inputs, num_outputs, stride, dropout)]
    blocks += [_Block(num_outputs, num_outputs, 1, dropout) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)
