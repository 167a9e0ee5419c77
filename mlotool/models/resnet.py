"""The residual networks of the CIFAR experiments, for small images, and wide ones of few layers."""

from collections.abc import Callable
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import BelowOne, Count, Layers, Shape, target

# b: batch, c: channels, h, w: height and width, k: classes


@target("module")
class ResNet(nn.Module):
    """A residual network of depth 6n + 2: three stages of n blocks, with width, 2 width and 4 width channels.

    Shortcuts are "option A" of the paper, as in the CIFAR networks of the paper and of Meta-Weight-Net: where the shape
    changes, they take every second pixel and pad the channels with zeros, so they have no parameters. Convolutions and
    the last layer are initialized from He's normal distribution. Every stage but the first halves the image: 8 x 8
    images are 2 x 2, and 28 x 28 images 7 x 7, before the mean over pixels.

    Args:
        depth: 6n + 2: 8, 14, 20, 32, 44, 56, 110, ...
        num_classes: k.
        image_shape: (c, h, w); only c matters.
        width: channels of the first stage.

    Raises:
        ConfigError: `depth` is not of the form 6n + 2.

    Source: He et al. 2016, Deep Residual Learning for Image Recognition, section 4.2, table 6: 0.27 million parameters
    for depth 20, 0.46 for 32, 0.85 for 56, 1.7 for 110.

    Example:
        >>> import torch
        >>> ResNet(20, 10, [3, 32, 32])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: Layers, num_classes: Count, image_shape: Shape, width: Count = 16) -> None:
        super().__init__()
        length = num_blocks(depth, 2)
        self.convolution = _convolution(image_shape[0], width, stride=1)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            _stage(_Block, width, width, length, 1),
            _stage(_Block, width, 2 * width, length, 2),
            _stage(_Block, 2 * width, 4 * width, length, 2),
        )
        self.classifier = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        return self.features_and_logits(images)[1]

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the last layer (b, 4 width), and the logits (b, k)."""
        features = F.relu(self.norm(self.convolution(images)))
        features = self.stages(features).mean(dim=(2, 3))
        return features, self.classifier(features)


class _Block(nn.Module):
    """Two 3 x 3 convolutions and the shortcut around them."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution_1 = _convolution(num_inputs, num_outputs, stride)
        self.norm_1 = nn.BatchNorm2d(num_outputs)
        self.convolution_2 = _convolution(num_outputs, num_outputs, stride=1)
        self.norm_2 = nn.BatchNorm2d(num_outputs)
        self.stride = stride
        self.padding = (num_outputs - num_inputs) // 2

    def forward(self, images: Tensor) -> Tensor:
        residual = F.relu(self.norm_1(self.convolution_1(images)))
        residual = self.norm_2(self.convolution_2(residual))
        return F.relu(residual + self._shortcut(images))

    def _shortcut(self, images: Tensor) -> Tensor:
        if self.stride == 1:
            return images
        subsampled = images[:, :, :: self.stride, :: self.stride]
        return F.pad(subsampled, [0, 0, 0, 0, self.padding, self.padding])


def _stage(
    block: Callable[..., nn.Module], num_inputs: int, num_outputs: int, num_blocks: int, stride: int, **settings: float
) -> nn.Sequential:
    blocks = [block(num_inputs, num_outputs, stride, **settings)]
    blocks += [block(num_outputs, num_outputs, 1, **settings) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)


def _convolution(num_inputs: int, num_outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(num_inputs, num_outputs, kernel_size=3, stride=stride, padding=1, bias=False)


def num_blocks(depth: int, num_others: int) -> int:
    """Return the blocks of each of three stages, of two layers a block, beside so many others; or raise ConfigError."""
    is_right = depth > num_others and (depth - num_others) % 6 == 0
    require(
        is_right, "depth", depth, f"6n + {num_others}, such as {', '.join(str(6 * n + num_others) for n in (1, 2, 5))}"
    )
    return (depth - num_others) // 6


@target("module")
class WideResNet(nn.Module):
    """A wide residual network of depth 6n + 4: three stages of n blocks with 16 f, 32 f and 64 f channels.

        x <- shortcut(x) + conv(relu(norm(conv(relu(norm(x))))))      (each block)

    Norm and ReLU come before the convolutions. Where the shape changes, the shortcut is a 1 x 1 convolution of the
    normalized input. The second and the third stage halve the image.

    Args:
        depth: 6n + 4: 10, 16, 22, 28, 40, ...
        widen_factor: f.
        num_classes: k.
        image_shape: (c, h, w); only c matters.
        width: channels before the first stage; the stages have f, 2 f and 4 f times as many.
        dropout: probability with which entries are dropped between the two convolutions of a block.

    Raises:
        ConfigError: `depth` is not of the form 6n + 4.

    Source: Zagoruyko and Komodakis 2016, Wide Residual Networks (arXiv 1605.07146), table 1: 36.5 million parameters
    for depth 28, f = 10 and ten classes. Sun et al. 2021 (arXiv 2112.05387), section 5.2, train depth 40 with auxiliary
    networks of depths 28 and 16.

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
        shapes = zip(pairwise(widths), (1, 2, 2), strict=True)
        stages = (_stage(_WideBlock, *ends, length, stride, dropout=dropout) for ends, stride in shapes)
        self.stages = nn.Sequential(*stages)
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
        """Return the input of the last layer (b, 4 f width), and the logits (b, k)."""
        features = F.relu(self.norm(self.stages(self.convolution(images)))).mean(dim=(2, 3))
        return features, self.classifier(features)


class _WideBlock(nn.Module):
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
