"""A finite number of augmented copies of each sample, for what is kept by sample and copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.data.augmentation import CropAndFlip

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
