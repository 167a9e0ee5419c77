"""Any image data set that lies as files in one folder a class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import MinLen

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import Count, Finite, NonNegative, Positive, Seed, Shape, Threads, Whole, target
from mlotool.data.image_data import (
    AbstractImageData,
    AugmentedCopies,
    CropAndFlip,
    ImageFiles,
    LabelNoise,
    Normalization,
    Part,
    SplitOptions,
    load_images,
)
from mlotool.data.splits import ImbalanceFactor

SUFFIXES = (".jpg", ".jpeg", ".png")


@target("data")
class ImageFolder(AbstractImageData):
    """Images in `root/train/<class>/*.jpg|jpeg|png`, and in `root/test/<class>/` where there is a test part.

    Classes are numbered in the order of their folders' names. The images of all splits are decoded once, into
    memory as uint8, where they take at most `max_memory_gb`; else each batch is decoded when it is asked for. Nothing
    is written.

    Args:
        root: the folder that holds `train`.
        sizes: see `SplitOptions`, as for the other keywords up to `label_noise`.
        num_classes: number of class folders.
        image_shape: (3, h, w); images of another size are scaled and cut to it.
        seed: of splits and noise.
        imbalance_factor: of the long tail of `train`, or None.
        label_noise: of `train`, or None.
        augment: random crops (padding 4) and flips for `train`; a number: so many copies, always the same ones.
        mean: of each channel, in 0 .. 1; ImageNet's by default.
        std: of each channel, in 0 .. 1; ImageNet's by default.
        max_memory_gb: in 10^9 bytes.
        num_threads: that decode.

    Raises:
        ConfigError: the folder is not there or is not laid out like this; the options do not fit the data.
    """

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        num_classes: Count,
        image_shape: Shape,
        seed: Seed = 0,
        imbalance_factor: ImbalanceFactor | None = None,
        label_noise: LabelNoise | None = None,
        augment: bool | Whole = False,
        mean: Annotated[Sequence[Finite], MinLen(1)] = (0.485, 0.456, 0.406),
        std: Annotated[Sequence[Positive], MinLen(1)] = (0.229, 0.224, 0.225),
        max_memory_gb: NonNegative = 4.0,
        num_threads: Threads = 8,
    ) -> None:
        check_rgb(image_shape)
        folder = at_home(root)
        classes = _class_names(folder / "train", root)
        train = find_images(folder / "train", classes, image_shape, num_threads)
        test = None
        if (folder / "test").is_dir():
            _check_same_classes(classes, _class_names(folder / "test", root), root)
            test = find_images(folder / "test", classes, image_shape, num_threads)
        super().__init__(
            train,
            test,
            SplitOptions(sizes, num_classes, image_shape, seed, imbalance_factor, label_noise),
            Normalization(mean, std),
            AugmentedCopies.of(CropAndFlip(), augment),
        )
        # Only now, so that what no split uses is never decoded.
        load_images(self, max_memory_gb)


def check_rgb(image_shape: Sequence[int]) -> None:
    """Raise ConfigError unless the shape is one of an RGB image."""
    if len(image_shape) != 3 or image_shape[0] != 3:
        raise ConfigError(
            f"data.image_shape={list(image_shape)}; expected [3, height, width], as files are read as RGB images. "
            "Set data.image_shape=[3,64,64]."
        )


def _class_names(folder: Path, root: str) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise ConfigError(
            f"data.root={root}: {folder} has no class folders; expected {folder}/<class>/*.jpg or *.png. Set data.root "
            "to the folder that holds train/ (and test/, if there is one)."
        )
    return names


def _check_same_classes(train: list[str], test: list[str], root: str) -> None:
    if train != test:
        differing = ", ".join(sorted(set(train) ^ set(test)))
        raise ConfigError(
            f"data.root={root}: the classes {differing} are only in one of train/ and test/; expected the same class "
            "folders in both. Add the missing folders or take the surplus ones away."
        )


def find_images(folder: Path, classes: Sequence[str], image_shape: Sequence[int], num_threads: int) -> Part:
    """Return the images in `folder/<class>/`, undecoded; classes are numbered in the order given."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in SUFFIXES)
        if not found:
            raise ConfigError(
                f"{folder / name} has no images; expected files that end in {', '.join(SUFFIXES)}. Add some, or take "
                "the folder away."
            )
        paths += found
        labels += [label] * len(found)
    return Part(ImageFiles(paths, image_shape[1], image_shape[2], num_threads), torch.tensor(labels))
