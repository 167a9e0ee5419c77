"""Train augmentation of a whole batch at once, reproducible from a seed; or a finite number of copies of a sample."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core.errors import ConfigError

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


# b: batch, c: channels, h, w: height and width


class AugmentedCopies:
    """Every sample has `num_copies` augmented images, always the same ones; a batch has one of them of each sample.

    Auxiliary variables that are stored by sample (`mlotool.layerparallel.Auxiliary`) need to meet the same image
    again, which random augmentation never does.

    Args:
        augmentation: that each copy has gone through once.
        num_copies: of each sample.

    Source: Sun et al. 2021, Layer-Parallel Training of Residual Networks with Auxiliary-Variable Networks, figure 4.

    Example:
        >>> copies = AugmentedCopies(CropAndFlip(1), num_copies=2)
        >>> images, index = torch.rand(3, 1, 4, 4), torch.tensor([5, 0, 2])
        >>> torch.equal(copies(images, index, torch.tensor([1, 0, 1])), copies(images, index, torch.tensor([1, 0, 1])))
        True
    """

    def __init__(self, augmentation: CropAndFlip, num_copies: int) -> None:
        self.augmentation = augmentation
        self.num_copies = num_copies

    @staticmethod
    def of(augmentation: CropAndFlip, augment: bool | int) -> "CropAndFlip | AugmentedCopies | None":
        """Return what a data set's setting asks for: none, new random images each time, or so many copies.

        Raises:
            ConfigError: the setting is a number below 1.
        """
        if isinstance(augment, bool):
            return augmentation if augment else None
        if augment < 1:
            raise ConfigError(
                f"data.augment: found {augment}; expected true, false, or a number of copies of at least 1. "
                "Correct data.augment."
            )
        return AugmentedCopies(augmentation, augment)

    def draw(self, size: int, generator: torch.Generator | None = None) -> Tensor:
        """Return which copy of each of so many samples comes, (b,) int64."""
        return torch.randint(self.num_copies, (size,), generator=generator)

    def __call__(self, images: Tensor, index: Tensor, copy: Tensor) -> Tensor:
        """Return the images of given copies.

        Args:
            images: (b, c, h, w), as they were read.
            index: (b,), the samples' positions in their split.
            copy: (b,), which one of each.
        """
        slots: Sequence[int] = (index * self.num_copies + copy).tolist()
        # A generator a copy: what it draws depends on no other sample, and on no order.
        found = [
            self.augmentation(image[None], torch.Generator().manual_seed(slot))
            for image, slot in zip(images, slots, strict=True)
        ]
        return torch.cat(found) if found else images
