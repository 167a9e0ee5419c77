"""Any image data set that lies as files in one folder a class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import MinLen

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Finite, Positive, target
from mlotool.data import image_data
from mlotool.data.image_data import AugmentedCopies, CropAndFlip, ImageFiles, Normalization, Part

SUFFIXES = (".jpg", ".jpeg", ".png")


@target("data")
@dataclass(eq=False)
class ImageFolder(image_data.AbstractImageData, image_data.ImageFileData):
    """Images in `root/train/<class>/*.jpg|jpeg|png`, and in `root/test/<class>/` where there is a test part.

    Classes are numbered in the order of their folders' names. The images of all splits are decoded once, into
    memory as uint8, where they take at most `max_memory_gb`; else each batch is decoded when it is asked for. Nothing
    is written.

    Args:
        root: the folder that holds `train`.
        sizes: see `AbstractImageData`, as for the other keywords up to `label_noise`.
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

    augment: bool | Count = False
    mean: Annotated[Sequence[Finite], MinLen(1)] = (0.485, 0.456, 0.406)
    std: Annotated[Sequence[Positive], MinLen(1)] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        image_data.check_rgb(self.image_shape)
        classes = _class_names(self.folder / "train")
        train, test = find_images(self.folder / "train", classes, self.image_shape, self.num_threads), None
        if (self.folder / "test").is_dir():
            check_same_classes(self.root, "train", "test", classes, _class_names(self.folder / "test"))
            test = find_images(self.folder / "test", classes, self.image_shape, self.num_threads)
        self._split(train, test, Normalization(self.mean, self.std), AugmentedCopies.of(CropAndFlip(), self.augment))
        # Only now, so that what no split uses is never decoded.
        image_data.load_images(self, self.max_memory_gb)


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    expected = f"class folders in {folder.name}/ (and in test/, if there is one), with *.jpg or *.png"
    require(bool(names), "data.root", str(folder.parent), expected, "Set data.root to the folder that holds them.")
    return names


def check_same_classes(root: str, one: str, other: str, classes: Sequence[str], others: Sequence[str]) -> None:
    """Raise ConfigError unless both parts of the data have the same class folders."""
    if differing := ", ".join(sorted(set(classes) ^ set(others))):
        raise ConfigError(
            f"data.root={root}: the classes {differing} are only in one of {one} and {other}; expected the same class "
            "folders in both. Add the missing folders or take the surplus ones away."
        )


def find_images(folder: Path, classes: Sequence[str], image_shape: Sequence[int], num_threads: int) -> Part:
    """Return the images in `folder/<class>/`, undecoded; classes are numbered in the order given."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in SUFFIXES)
        expected = f"images in it, files that end in {', '.join(SUFFIXES)}"
        require(bool(found), "data.root", str(folder / name), expected, "Add some, or take the folder away.")
        paths += found
        labels += [label] * len(found)
    return Part(ImageFiles(paths, image_shape[1], image_shape[2], num_threads), torch.tensor(labels))
