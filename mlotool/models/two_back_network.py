"""A network of blocks each of which reads the two before it, as networks of cells do."""

from collections.abc import Sequence

from torch import Tensor, nn

from mlotool.core.settings import Count, Shape, target
from mlotool.models.cell_network import HalvingConvolution, operation, pointwise

# b: batch, c: channels, h, w: height and width, k: classes


@target("module")
class TwoBackNetwork(nn.Module):
    """A stem, blocks that read the two results before them, the mean over pixels, a linear layer.

        x_i = block_i(latest_i(x_{i-1}), before_i(x_{i-2})),   block(x, y) = separable(x) + y

    `latest` and `before` bring what a block reads to its width and to one size; a block that halves the image reads
    its second input through a convolution of stride 2. So a block is where a cell can stand: `blocks.0`, `blocks.1`.

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        width: channels of the first block.
        halves: for each block whether it halves the image and doubles the width.

    Source: Zoph et al. 2018, NASNet (arXiv 1707.07012), figure 2: the stack that cells stand in; here of plain
    blocks.

    Example:
        >>> import torch
        >>> TwoBackNetwork([1, 8, 8], 10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, image_shape: Shape, num_classes: Count, width: Count = 8, halves: Sequence[bool] = (False, True, False)
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(image_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.latest, self.before, self.blocks = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        num_latest = num_before = width
        is_larger = False
        for is_halving in halves:
            width *= 2 if is_halving else 1
            self.latest.append(pointwise(num_latest, width, affine=True))
            bring = HalvingConvolution if is_larger else pointwise
            self.before.append(bring(num_before, width, affine=True))
            self.blocks.append(_Block(width, 2 if is_halving else 1))
            num_latest, num_before, is_larger = width, num_latest, is_halving
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        last = before = self.stem(images)
        for bring_latest, bring_before, block in zip(self.latest, self.before, self.blocks, strict=True):
            last, before = block(bring_latest(last), bring_before(before)), last
        return self.classifier(last.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.separable = operation("sep_conv_3x3", width, stride, affine=True)
        self.skip = operation("skip_connect", width, stride, affine=True)

    def forward(self, latest: Tensor, before: Tensor) -> Tensor:
        return self.separable(latest) + self.skip(before)
