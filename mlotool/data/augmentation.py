"""Train augmentation of a whole batch at once, reproducible from a seed."""

import torch
import torch.nn.functional as F
from torch import Tensor

# n: images, c: channels, h, w: height and width, p: padding


class CropAndFlip:
    """Random crops of the zero-padded images, then (unless `flip` is false) a flip of every second one on average.

    Args:
        padding: pixels added on each side before the crop; offsets are uniform over `0 .. 2 * padding`.
        flip: whether images are flipped horizontally; digits must not be.

    Source: He et al. 2016, Deep Residual Learning for Image Recognition, section 4.2 (padding 4, CIFAR-10).

    Example:
        >>> images = torch.ones(2, 3, 32, 32, dtype=torch.uint8)
        >>> CropAndFlip()(images, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        self.padding = padding
        self.flip = flip

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return augmented images.

        Args:
            images: (n, c, h, w), any dtype; zero is what the border is filled with.
            generator: where the offsets and flips are drawn from; None: torch's global generator.

        Returns:
            (n, c, h, w), same dtype.
        """
        num_images, _, height, width = images.shape
        offsets = torch.randint(0, 2 * self.padding + 1, (2, num_images), generator=generator)
        cropped = _windows(F.pad(images, [self.padding] * 4).contiguous(), height, width, offsets)
        if not self.flip:
            return cropped
        chosen = torch.nonzero(torch.rand(num_images, generator=generator) < 0.5).squeeze(1)
        return cropped.index_copy_(0, chosen, cropped.index_select(0, chosen).flip(-1))


def _windows(images: Tensor, height: int, width: int, offsets: Tensor) -> Tensor:
    """Return one window of each image: (n, c, height, width), copied.

    Args:
        images: (n, c, h, w), contiguous.
        height: of a window.
        width: likewise.
        offsets: (2, n), rows above and columns before the window.
    """
    num_images, num_channels, num_rows, num_columns = images.shape
    plane = num_rows * num_columns
    # A window for each entry that one could begin at, all of them views of the same memory; only the chosen are copied.
    num_begins = images.numel() - (num_channels - 1) * plane - (height - 1) * num_columns - (width - 1)
    windows = images.as_strided((max(num_begins, 0), num_channels, height, width), (1, plane, num_columns, 1))
    begins = torch.arange(num_images) * num_channels * plane + offsets[0] * num_columns + offsets[1]
    return windows.index_select(0, begins)
