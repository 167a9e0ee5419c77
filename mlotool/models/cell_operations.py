"""The eight operations of the DARTS search space, and the layers around a cell."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.settings import Count, target

# b: batch, c: channels, h, w: height and width


@target("module")
def operation(name: str, width: Count, stride: Count, *, affine: bool) -> nn.Module:
    """Build one operation of a cell: (b, width, h, w) to (b, width, h / stride, w / stride).

    Args:
        name: `none`, `skip_connect`, `max_pool_3x3`, `avg_pool_3x3`, `sep_conv_3x3`, `sep_conv_5x5`, `dil_conv_3x3` or
            `dil_conv_5x5`.
        width: c.
        stride: 1 or 2.
        affine: whether BatchNorm has a scale and a shift of its own; not in a search, where they would rescale the
            operations that the architecture weighs. A search also normalises what is pooled.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 3.1.
    """
    build: dict[str, Callable[[], nn.Module]] = {
        "none": lambda: Zero(stride),
        "max_pool_3x3": lambda: _pool(nn.MaxPool2d(3, stride, 1), width, affine),
        "avg_pool_3x3": lambda: _pool(nn.AvgPool2d(3, stride, 1, count_include_pad=False), width, affine),
        "skip_connect": lambda: nn.Identity() if stride == 1 else HalvingConvolution(width, width, affine=affine),
        "sep_conv_3x3": lambda: _separable(width, 3, stride, affine),
        "sep_conv_5x5": lambda: _separable(width, 5, stride, affine),
        "dil_conv_3x3": lambda: nn.Sequential(*_depthwise(width, 3, stride, 2, affine)),
        "dil_conv_5x5": lambda: nn.Sequential(*_depthwise(width, 5, stride, 2, affine)),
    }
    return build[name]()


@target("module")
def pointwise(num_inputs: Count, num_outputs: Count, *, affine: bool) -> nn.Sequential:
    """Build ReLU, 1 x 1 convolution and BatchNorm: what brings a cell's inputs to its width."""
    convolution = nn.Conv2d(num_inputs, num_outputs, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(num_outputs, affine=affine))


@target("module")
def crossed_convolution(width: Count, stride: Count, size: Count = 3, *, affine: bool) -> nn.Sequential:
    """Build ReLU, a convolution along the rows, one along the columns, and BatchNorm.

    Args:
        width: c.
        stride: 1 or 2.
        size: of both, odd; the paper has 7, for larger images.
        affine: see `operation`.

    Source: Real et al. 2019, AmoebaNet (arXiv 1802.01548), section 3.1: "1x7 then 7x1 convolution".
    """
    rows = nn.Conv2d(width, width, (1, size), (1, stride), (0, size // 2), bias=False)
    columns = nn.Conv2d(width, width, (size, 1), (stride, 1), (size // 2, 0), bias=False)
    return nn.Sequential(nn.ReLU(), rows, columns, nn.BatchNorm2d(width, affine=affine))


class Zero(nn.Module):
    """No connection: zeros, of the size that the stride leaves."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(images[:, :, :: self.stride, :: self.stride])


class HalvingConvolution(nn.Module):
    """Half the size without losing a pixel: two 1 x 1 convolutions of stride 2, one pixel apart, side by side."""

    def __init__(self, num_inputs: int, num_outputs: int, *, affine: bool) -> None:
        super().__init__()
        half = num_outputs // 2
        # A space reads it for what it puts in this place: of an odd size, shapes do not tell.
        self.stride = 2
        self.even = nn.Conv2d(num_inputs, half, 1, stride=self.stride, bias=False)
        self.odd = nn.Conv2d(num_inputs, num_outputs - half, 1, stride=self.stride, bias=False)
        self.norm = nn.BatchNorm2d(num_outputs, affine=affine)

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, num_outputs, h / 2, w / 2), rounded up."""
        images = F.relu(images)
        # Zeros behind the last row and column: an odd size has no odd pixel there.
        shifted = F.pad(images, [0, 1, 0, 1])[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(images), self.odd(shifted)], dim=1))


def _pool(pool: nn.Module, width: int, affine: bool) -> nn.Module:
    return pool if affine else nn.Sequential(pool, nn.BatchNorm2d(width, affine=False))


def _separable(width: int, size: int, stride: int, affine: bool) -> nn.Sequential:
    return nn.Sequential(*_depthwise(width, size, stride, 1, affine), *_depthwise(width, size, 1, 1, affine))


def _depthwise(width: int, size: int, stride: int, dilation: int, affine: bool) -> list[nn.Module]:
    padding = dilation * (size - 1) // 2
    return [
        nn.ReLU(),
        nn.Conv2d(width, width, size, stride, padding, dilation, groups=width, bias=False),
        nn.Conv2d(width, width, 1, bias=False),
        nn.BatchNorm2d(width, affine=affine),
    ]
