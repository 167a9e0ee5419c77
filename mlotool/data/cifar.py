"""CIFAR-10 and CIFAR-100, from the Python files that they were published in.

The files are pickles, which are code; they are only opened when their checksums are the published ones.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from mlotool.core.settings import Count, Seed, Shape, Whole, target
from mlotool.data.image_data import (
    AbstractImageData,
    AugmentedCopies,
    CropAndFlip,
    LabelNoise,
    Normalization,
    Part,
    SplitOptions,
    read_with_torchvision,
)
from mlotool.data.splits import ImbalanceFactor


class AbstractCIFAR(AbstractImageData):
    """50,000 + 10,000 photographs of 32 x 32 pixels.

    Args:
        root: the folder that holds the folder of the published files.
        sizes: see `SplitOptions`, as for the other keywords up to `label_noise`.
        num_classes: 10 or 100, as published; None takes that.
        image_shape: (3, 32, 32).
        seed: of splits and noise.
        imbalance_factor: of the long tail of `train`, or None.
        label_noise: of `train`, or None.
        augment: random crops (padding 4) and flips for `train`; a number: so many copies, always the same ones.
        download: fetch the files into `root` where they are missing.

    Raises:
        ConfigError: the files are not there; the options do not fit the data.

    Source: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images.
    """

    reader: ClassVar[str]
    """torchvision's name of the data."""

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

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        num_classes: Count | None = None,
        image_shape: Shape = (3, 32, 32),
        seed: Seed = 0,
        imbalance_factor: ImbalanceFactor | None = None,
        label_noise: LabelNoise | None = None,
        augment: bool | Whole = True,
        download: bool = False,
    ) -> None:
        num_classes = self.published_classes if num_classes is None else num_classes
        is_long_tailed = imbalance_factor is not None
        super().__init__(
            self._read(root, is_train=True, download=download, is_long_tailed=is_long_tailed),
            self._read(root, is_train=False, download=download, is_long_tailed=is_long_tailed),
            SplitOptions(sizes, num_classes, image_shape, seed, imbalance_factor, label_noise),
            Normalization(mean=list(self.mean), std=list(self.std)),
            AugmentedCopies.of(CropAndFlip(), augment),
        )

    def _read(self, root: str, *, is_train: bool, download: bool, is_long_tailed: bool) -> Part:
        instead = ""
        if self.folder_option is not None:
            option = f"{self.folder_option}_longtailed" if is_long_tailed else self.folder_option
            instead = f"; for a tree of JPEG or PNG files use data={option}"
        published = read_with_torchvision(
            self.reader, root, is_train=is_train, download=download, files=self.files, instead=instead
        )
        images = torch.from_numpy(published.data).permute(0, 3, 1, 2).contiguous()
        return Part(images, torch.tensor(published.targets))


@target("data")
class CIFAR10(AbstractCIFAR):
    """The photographs in ten classes, read from `root/cifar-10-batches-py`; arguments as for `AbstractCIFAR`."""

    reader = "CIFAR10"
    published_classes = 10
    files = "cifar-10-batches-py/ with the published data_batch_1 .. data_batch_5, test_batch and batches.meta"
    folder_option = "cifar10_folder"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)


@target("data")
class CIFAR100(AbstractCIFAR):
    """The photographs in a hundred classes (fine labels), read from `root/cifar-100-python`; arguments likewise."""

    reader = "CIFAR100"
    published_classes = 100
    files = "cifar-100-python/ with the published train, test and meta"
    folder_option = None
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
