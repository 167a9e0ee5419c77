"""CIFAR-10 and CIFAR-100, from the Python files that they were published in.

The files are pickles, which are code; they are only opened when their checksums are the published ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mlotool.data.augmentation import CropAndFlip
from mlotool.data.augmented_copies import AugmentedCopies
from mlotool.data.image_data import AbstractImageData, Part, SplitOptions
from mlotool.data.in_memory import Normalization
from mlotool.data.torchvision_part import read_with_torchvision


class CIFAR10(AbstractImageData):
    """50,000 + 10,000 photographs of 32 x 32 pixels in ten classes, read from `root/cifar-10-batches-py`.

    Args:
        root: the folder that holds `cifar-10-batches-py/`.
        sizes: see `SplitOptions`, as for the other keywords up to `label_noise`.
        num_classes: 10.
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

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, int],
        num_classes: int = 10,
        image_shape: Sequence[int] = (3, 32, 32),
        seed: int = 0,
        imbalance_factor: float | None = None,
        label_noise: Mapping[str, Any] | None = None,
        augment: bool | int = True,
        download: bool = False,
    ) -> None:
        option = "cifar10_folder" if imbalance_factor is None else "cifar10_folder_longtailed"
        files = "cifar-10-batches-py/ with the published data_batch_1 .. data_batch_5, test_batch and batches.meta"
        instead = f"; for a tree of JPEG or PNG files use data={option}"
        super().__init__(
            _read("CIFAR10", root, is_train=True, download=download, files=files, instead=instead),
            _read("CIFAR10", root, is_train=False, download=download, files=files, instead=instead),
            SplitOptions(sizes, num_classes, image_shape, seed, imbalance_factor, label_noise),
            Normalization(mean=[0.4914, 0.4822, 0.4465], std=[0.2470, 0.2435, 0.2616]),
            AugmentedCopies.of(CropAndFlip(), augment),
        )


class CIFAR100(AbstractImageData):
    """50,000 + 10,000 photographs of 32 x 32 pixels in a hundred classes, read from `root/cifar-100-python`.

    Args:
        root: the folder that holds `cifar-100-python/`.
        sizes: see `SplitOptions`, as for the other keywords up to `label_noise`.
        num_classes: 100, the fine labels.
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

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, int],
        num_classes: int = 100,
        image_shape: Sequence[int] = (3, 32, 32),
        seed: int = 0,
        imbalance_factor: float | None = None,
        label_noise: Mapping[str, Any] | None = None,
        augment: bool | int = True,
        download: bool = False,
    ) -> None:
        files = "cifar-100-python/ with the published train, test and meta"
        super().__init__(
            _read("CIFAR100", root, is_train=True, download=download, files=files),
            _read("CIFAR100", root, is_train=False, download=download, files=files),
            SplitOptions(sizes, num_classes, image_shape, seed, imbalance_factor, label_noise),
            Normalization(mean=[0.5071, 0.4865, 0.4409], std=[0.2673, 0.2564, 0.2762]),
            AugmentedCopies.of(CropAndFlip(), augment),
        )


def _read(name: str, root: str, *, is_train: bool, download: bool, files: str, instead: str = "") -> Part:
    reader = read_with_torchvision(name, root, is_train=is_train, download=download, files=files, instead=instead)
    images = torch.from_numpy(reader.data).permute(0, 3, 1, 2).contiguous()
    return Part(images, torch.tensor(reader.targets))
