"""The handwritten digits that come with scikit-learn: real data without a network."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mlotool.core.settings import Count, Shape, target
from mlotool.data.image_data import AbstractImageData, CropAndFlip, Normalization, Part

NORMALIZATION = Normalization(mean=[0.3053], std=[0.3760], max_value=16.0)


@target("data")
@dataclass(eq=False)
class Digits(AbstractImageData):
    """1,797 handwritten digits of 8 x 8 pixels with 17 grey levels; 174 to 183 a class, no published test part.

    Args:
        sizes: see `AbstractImageData`, as for all keywords; all splits are drawn from the 1,797.
        num_classes: 10.
        image_shape: (1, 8, 8).
        seed: of splits and noise.
        imbalance_factor: of the long tail of `train`, or None.
        label_noise: of `train`, or None.
        augment: random crops (padding 1) for `train`.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (UCI), the test part of it.

    Example:
        >>> data = Digits({"train": 1000, "meta": 100, "val": 200, "test": 497})
        >>> len(data.split("train")), data.split("meta")[0]["input"].shape
        (1000, torch.Size([1, 8, 8]))
    """

    num_classes: Count = 10
    image_shape: Shape = (1, 8, 8)
    augment: bool = False

    def __post_init__(self) -> None:
        augmentation = CropAndFlip(padding=1, flip=False) if self.augment else None
        self._split(read_digits(), None, NORMALIZATION, augmentation)


def read_digits() -> Part:
    """Return all digits, uint8 from 0 to 16, in tensors of the caller's own."""
    images, target = _parsed()
    return Part(images.clone(), target.clone())


@cache
def _parsed() -> tuple[Tensor, Tensor]:
    """Return the file's digits: parsing it takes longer than all else that a run's data take."""
    from sklearn.datasets import load_digits  # takes most of a second to import

    digits = load_digits()
    return torch.from_numpy(digits.images).to(torch.uint8)[:, None], torch.from_numpy(digits.target).long()
