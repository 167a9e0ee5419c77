"""Inverted residual blocks with squeeze and excitation, and a small network of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlotool.core.settings import Count, NonNegative, Positive, Shape, target

# b: batch, c: channels, h, w: height and width, k: classes


@target("module")
class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor that is computed from the means of all channels (squeeze and excitation).

        y = x * sigmoid(W_2 relu(W_1 mean(x)))

    Args:
        num_channels: c.
        ratio: width of the hidden layer, as a multiple of c; at least one unit.

    Source: Hu et al. 2018, Squeeze-and-Excitation Networks (arXiv 1709.01507), section 3.

    Example:
        >>> SqueezeExcitation(8)(torch.zeros(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(self, num_channels: Count, ratio: Positive = 0.25) -> None:
        super().__init__()
        num_hidden = max(1, round(ratio * num_channels))
        self.squeeze = nn.Linear(num_channels, num_hidden)
        self.excite = nn.Linear(num_hidden, num_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Return scaled images (b, c, h, w)."""
        scale = torch.sigmoid(self.excite(torch.relu(self.squeeze(images.mean(dim=(2, 3))))))
        return images * scale[:, :, None, None]


@target("module")
class InvertedResidual(nn.Module):
    """An inverted residual block: it widens, filters each channel by itself, and narrows.

        y = project(squeeze(depthwise(expand(x)))),   x + y where both have the same shape

    Args:
        num_inputs: channels that it reads.
        num_outputs: channels that it returns.
        stride: stride of the depthwise convolution.
        expansion: width of the middle, as a multiple of `num_inputs`; 1: no expansion.
        kernel_size: size of the depthwise convolution, odd.
        squeeze: `ratio` of the squeeze and excitation in the middle; 0: none.

    Source: Sandler et al. 2018, MobileNetV2 (arXiv 1801.04381), figure 4; with squeeze and excitation, Tan et al. 2019,
    MnasNet (arXiv 1807.11626), figure 7.

    Example:
        >>> InvertedResidual(8, 16, stride=2)(torch.zeros(2, 8, 4, 4)).shape
        torch.Size([2, 16, 2, 2])
    """

    def __init__(
        self,
        num_inputs: Count,
        num_outputs: Count,
        stride: Count = 1,
        expansion: Count = 3,
        kernel_size: Count = 3,
        squeeze: NonNegative = 0.0,
    ) -> None:
        super().__init__()
        width = expansion * num_inputs
        self.expand = _convolution(num_inputs, width, 1) if expansion > 1 else nn.Identity()
        self.depthwise = _convolution(width, width, kernel_size, stride, groups=width)
        self.squeeze = SqueezeExcitation(width, squeeze) if squeeze else nn.Identity()
        self.project = nn.Sequential(nn.Conv2d(width, num_outputs, 1, bias=False), nn.BatchNorm2d(num_outputs))
        self.is_residual = stride == 1 and num_inputs == num_outputs

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, num_outputs, h / stride, w / stride)."""
        features = self.project(self.squeeze(self.depthwise(self.expand(images))))
        return images + features if self.is_residual else features


@target("module")
class InvertedResidualNetwork(nn.Module):
    """A stem, stages of inverted residual blocks, the mean over pixels, a linear layer.

    The first block of a stage has the stage's stride and width; all others keep the shape.

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        widths: channels of each stage; the stem has as many as the first stage.
        strides: stride of each stage.
        depths: number of blocks of each stage.
        expansion: expansion of all blocks.
        kernel_size: size of all depthwise convolutions.

    Source: Tan et al. 2019, MnasNet (arXiv 1807.11626), figure 4: the stages of its search space.

    Example:
        >>> InvertedResidualNetwork([1, 8, 8], 10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Shape,
        num_classes: Count,
        widths: Sequence[Count] = (8, 16, 24),
        strides: Sequence[Count] = (1, 2, 2),
        depths: Sequence[Count] = (2, 2, 2),
        expansion: Count = 3,
        kernel_size: Count = 3,
    ) -> None:
        super().__init__()
        self.stem = _convolution(image_shape[0], widths[0], 3)
        self.stages = nn.Sequential()
        num_inputs = widths[0]
        for width, stride, depth in zip(widths, strides, depths, strict=True):
            shapes = [(num_inputs, width, stride), *[(width, width, 1)] * (depth - 1)]
            blocks = [InvertedResidual(*shape, expansion=expansion, kernel_size=kernel_size) for shape in shapes]
            self.stages.append(nn.Sequential(*blocks))
            num_inputs = width
        self.classifier = nn.Linear(num_inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        return self.classifier(self.stages(self.stem(images)).mean(dim=(2, 3)))


def _convolution(num_inputs: int, num_outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(num_inputs, num_outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_outputs), nn.ReLU())
