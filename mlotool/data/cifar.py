"""CIFAR-10 and CIFAR-100, from the Python files that they were published in.

The files are pickles, which are code; they are only opened when their checksums are the published ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from mlotool.core.settings import Count, Shape, target
from mlotool.data import image_data
from mlotool.data.image_data import AugmentedCopies, CropAndFlip, Part


@dataclass(eq=False)
class AbstractCIFAR(image_data.AbstractImageData, image_data.FromTorchvision):
    """50,000 + 10,000 photographs of 32 x 32 pixels.

    Args:
        root: the folder that holds the folder of the published files.
        sizes: number of samples by split name; see `AbstractImageData`.
        num_classes: 10 or 100, as published; None takes the published number.
        image_shape: (3, 32, 32).
        seed: seed of splits and noise.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None; see
            `long_tail_counts`.
        label_noise: wrong labels in `train`, `{kind: uniform | flip, rate: 0 .. 1}`, or None; see `corrupt_labels`.
        augment: whether `train` has random crops (padding 4) and flips. A number: each sample has that many augmented
            copies, which stay the same.
        download: whether missing files are downloaded into `root`.

    Raises:
        ConfigError: the files are not there; the options do not fit the data.

    Source: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images.
    """

    published_classes: ClassVar[int]
    """How many classes the data have."""

    files: ClassVar[str]
    """The published files below `root`, in words."""

    folder_option: ClassVar[str | None]
    """The option for the same data as a tree of picture files, if there is one."""

    mean: ClassVar[Sequence[float]]
    """Of each channel of the train part."""

    std: ClassVar[Sequence[float]]
    """Likewise."""

    num_classes: Count | None = None  # type: ignore[assignment]
    image_shape: Shape = (3, 32, 32)
    augment: bool | Count = True

    def __post_init__(self) -> None:
        self.num_classes = self.num_classes or self.published_classes
        longtailed = "" if self.imbalance_factor is None else "_longtailed"
        folder = self.folder_option and f"; for a tree of JPEG or PNG files use data={self.folder_option}{longtailed}"
        train, test = (
            Part(torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets))
            for split in self._published(self.files, folder or "")
        )
        augmentation = AugmentedCopies.of(CropAndFlip(), self.augment)
        self._split(train, test, image_data.Normalization(mean=list(self.mean), std=list(self.std)), augmentation)


@target("data")
@dataclass(eq=False)
class CIFAR10(AbstractCIFAR):
    """The photographs in ten classes, read from `root/cifar-10-batches-py`; arguments as for `AbstractCIFAR`."""

    reader = "CIFAR10"
    published_classes = 10
    files = "cifar-10-batches-py/ with the published data_batch_1 .. data_batch_5, test_batch and batches.meta"
    folder_option = "cifar10_folder"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)


@target("data")
@dataclass(eq=False)
class CIFAR100(AbstractCIFAR):
    """The photographs in a hundred (fine) classes, from `root/cifar-100-python`; arguments as for `AbstractCIFAR`."""

    reader = "CIFAR100"
    published_classes = 100
    files = "cifar-100-python/ with the published train, test and meta"
    folder_option = None
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
