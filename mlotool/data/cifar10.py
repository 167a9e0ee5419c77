"""CIFAR-10, from the Python files that it was published in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mlotool.core.errors import ConfigError
from mlotool.data.augmentation import CropAndFlip
from mlotool.data.image_data import AbstractImageData, Part, SplitOptions
from mlotool.data.in_memory import Normalization


class CIFAR10(AbstractImageData):
    """50,000 + 10,000 photographs of 32 x 32 pixels in ten classes, read from `root/cifar-10-batches-py`.

    The files are pickles; they are only opened when their checksums are the published ones.

    Args:
        root: the folder that holds `cifar-10-batches-py/`.
        sizes: see `SplitOptions`, as for the other keywords up to `label_noise`.
        num_classes: 10.
        image_shape: (3, 32, 32).
        seed: of splits and noise.
        imbalance_factor: of the long tail of `train`, or None.
        label_noise: of `train`, or None.
        augment: random crops (padding 4) and horizontal flips for `train`.
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
        augment: bool = True,
        download: bool = False,
    ) -> None:
        image_files = "cifar10_folder" if imbalance_factor is None else "cifar10_folder_longtailed"
        super().__init__(
            _read(root, is_train=True, download=download, image_files=image_files),
            _read(root, is_train=False, download=download, image_files=image_files),
            SplitOptions(sizes, num_classes, image_shape, seed, imbalance_factor, label_noise),
            Normalization(mean=[0.4914, 0.4822, 0.4465], std=[0.2470, 0.2435, 0.2616]),
            CropAndFlip() if augment else None,
        )


def _read(root: str, *, is_train: bool, download: bool, image_files: str) -> Part:
    from torchvision import datasets  # takes a second to import

    try:
        reader = datasets.CIFAR10(Path(root).expanduser(), train=is_train, download=download)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"data.root={root}: CIFAR-10 could not be read from {Path(root) / 'cifar-10-batches-py'} "
            f"({_reason(error)}); "
            "expected the published files data_batch_1 .. data_batch_5, test_batch and batches.meta there. Set "
            "data.root to the folder that holds cifar-10-batches-py/, or data.download=true; for a tree of JPEG or PNG "
            f"files use data={image_files}."
        ) from error
    images = torch.from_numpy(reader.data).permute(0, 3, 1, 2).contiguous()
    return Part(images, torch.tensor(reader.targets))


def _reason(error: Exception) -> str:
    # torchvision goes on with advice in terms of its own arguments: "You can use download=True to download it".
    return str(error).partition(" You can use ")[0].rstrip(".")
