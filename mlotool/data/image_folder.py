"""Image files, in one folder per class or in lists: data sets of your own, OfficeHome, Clothing1M."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import torch
from annotated_types import MinLen

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Finite, NonNegative, Positive, Seed, Shape, Threads, target
from mlotool.data import image_data, splits
from mlotool.data.image_data import AugmentedCopies, CropAndFlip, Part

SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(eq=False)
class ImageFileData(image_data.AbstractImages, splits.FromFiles):
    """Base class of data whose images are files.

    Args:
        max_memory_gb: the most memory for decoded images, in 10^9 bytes; if all images fit, they are decoded once.
        num_threads: number of threads that decode images.
    """

    max_memory_gb: NonNegative = field(default=4.0, kw_only=True)
    num_threads: Threads = field(default=8, kw_only=True)

    def _check_rgb(self) -> None:
        is_rgb = len(self.image_shape) == 3 and self.image_shape[0] == 3
        expected = "[3, height, width], as files are read as RGB images"
        require(is_rgb, "data.image_shape", list(self.image_shape), expected)

    def _part(self, paths: Sequence[Path], labels: Sequence[int]) -> Part:
        """Return images, undecoded, with their labels."""
        height, width = self.image_shape[1:]
        return Part(image_data.ImageFiles(paths, height, width, self.num_threads), torch.tensor(labels))

    def _parts_of_folders(self, *folders: Path) -> list[Part]:
        """Return the images of folders that have the same class folders, numbered in the order of their names."""
        self._check_rgb()
        names = [sorted(path.name for path in folder.glob("*") if path.is_dir()) for folder in folders]
        parts, advice = [], "Set data.root to the folder that contains them."
        for folder, classes in zip(folders, names, strict=True):
            expected = (
                f"those of {folders[0].name}: {names[0]}" if names[0] else "one folder per class, with *.jpg or *.png"
            )
            is_right = bool(classes) and classes == names[0]
            require(is_right, f"data.root={self.root}: class folders in {folder.name}/", classes, expected, advice)
            images = [sorted(x for x in (folder / name).iterdir() if x.suffix.lower() in SUFFIXES) for name in classes]
            for name, paths in zip(classes, images, strict=True):
                expected = f"images in it, files that end in {', '.join(SUFFIXES)}"
                require(bool(paths), "data.root", str(folder / name), expected, "Add some, or remove the folder.")
            labels = [label for label, paths in enumerate(images) for _ in paths]
            parts.append(self._part([path for paths in images for path in paths], labels))
        return parts

    def _load(self) -> None:
        """Decode the images of all splits, where there is room; what no split uses is never decoded."""
        datasets = [self.split(name) for name in self.splits]
        if sum(prod(dataset.images.shape) for dataset in datasets) <= self.max_memory_gb * 1e9:
            for dataset in datasets:
                dataset.load()


@target("data")
@dataclass(eq=False)
class ImageFolder(image_data.AbstractImageData, ImageFileData):
    """Images in `root/train/<class>/*.jpg|jpeg|png`, and in `root/test/<class>/` where there is a test part.

    Classes are numbered in the order of their folders' names. If the images of all splits take at most `max_memory_gb`
    as uint8, they are decoded once, into memory; else each batch is decoded when it is needed. Nothing is written to
    the disk.

    Args:
        root: the folder that holds `train`.
        sizes: number of samples by split name; see `AbstractImageData`.
        num_classes: number of class folders.
        image_shape: (3, h, w); images of another size are scaled and cut to it.
        seed: seed of splits and noise.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None; see
            `long_tail_counts`.
        label_noise: wrong labels in `train`, `{kind: uniform | flip, rate: 0 .. 1}`, or None; see `corrupt_labels`.
        augment: whether `train` has random crops (padding 4) and flips. A number: each sample has that many augmented
            copies, which stay the same.
        mean: mean of each channel, in 0 .. 1; ImageNet's by default.
        std: standard deviation of each channel, in 0 .. 1; ImageNet's by default.
        max_memory_gb: the most memory for decoded images, in 10^9 bytes.
        num_threads: number of threads that decode images.

    Raises:
        ConfigError: the folder is not there or is not laid out like this; the options do not fit the data.
    """

    augment: bool | Count = False
    mean: Annotated[Sequence[Finite], MinLen(1)] = image_data.IMAGENET.mean
    std: Annotated[Sequence[Positive], MinLen(1)] = image_data.IMAGENET.std

    def __post_init__(self) -> None:
        folders = self.folder / "train", self.folder / "test"
        train, *test = self._parts_of_folders(*(folders if folders[1].is_dir() else folders[:1]))
        augmentation = AugmentedCopies.of(CropAndFlip(), self.augment)
        self._split(train, test[0] if test else None, image_data.Normalization(self.mean, self.std), augmentation)
        self._load()


# As most read them; the published folder of the last is "Real World".
Domain = Literal["Art", "Clipart", "Product", "RealWorld"]


@dataclass(eq=False)
class _Domains:
    root: str
    sizes: splits.Sizes
    source: Domain = "Art"
    target: Domain = "Clipart"


@target("data")
@dataclass(eq=False)
class OfficeHome(image_data.AbstractTwoDomains, ImageFileData, _Domains):
    """15,588 images in 65 classes and 4 domains, read from `root/<domain>/<class>/*.jpg`.

    Args:
        root: the folder that holds `Art/`, `Clipart/`, `Product/` and `Real World/` (or `Real_World/`, `RealWorld/`).
        sizes: number of images of `pretrain` (source domain) and of `finetune`, `meta`, `val` and `test` (target).
        source: the domain of `pretrain`: `Art`, `Clipart`, `Product` or `RealWorld`.
        target: the domain of all other splits.
        num_classes: 65.
        image_shape: (3, h, w); images of another size are scaled and their middle is cut out.
        seed: seed of the splits.
        augment: whether `pretrain` and `finetune` have random crops (padding an eighth of the height) and horizontal
            flips.
        max_memory_gb: the most memory for decoded images, in 10^9 bytes; if all images fit, they are decoded once.
        num_threads: number of threads that decode images.

    Raises:
        ConfigError: a folder is missing; the domains have different classes; or the options do not fit the data.

    Source: Venkateswara et al. 2017, Deep Hashing Network for Unsupervised Domain Adaptation.
    """

    num_classes: Count = 65
    image_shape: Shape = (3, 224, 224)
    seed: Seed = 0
    augment: bool = True

    def __post_init__(self) -> None:
        source, target = self._parts_of_folders(self._domain_folder(self.source), self._domain_folder(self.target))
        augmentation = CropAndFlip(padding=self.image_shape[1] // 8) if self.augment else None
        self._split(source, target, image_data.IMAGENET, augmentation)
        self._load()

    def _domain_folder(self, domain: str) -> Path:
        names = ["Real World", "Real_World", "RealWorld"] if domain == "RealWorld" else [domain]
        folders = [self.folder / name for name in names if (self.folder / name).is_dir()]
        advice = (
            "Download OfficeHomeDataset from https://www.hemanthdv.org/officeHomeDataset.html, unpack it, and set "
            "data.root to the folder that holds Art/, Clipart/, Product/ and Real World/."
        )
        require(bool(folders), "data.root", self.root, f"a folder with {names[0]}/<class>/*.jpg in it", advice)
        return folders[0]


# By split: the list of its images, and the labels.
FILES = {
    "train": ("noisy_train_key_list.txt", "noisy_label_kv.txt"),
    "meta": ("clean_train_key_list.txt", "clean_label_kv.txt"),
    "val": ("clean_val_key_list.txt", "clean_label_kv.txt"),
    "test": ("clean_test_key_list.txt", "clean_label_kv.txt"),
}


@target("data")
@dataclass(eq=False)
class Clothing1M(ImageFileData):
    """1,000,000 images with noisy labels (38.5% wrong), and 47,570 + 14,313 + 10,526 with clean labels; 14 classes.

    `train` has noisy labels; its clean labels are not known. `meta`, `val` and `test` are the published clean train,
    val and test parts.

    Args:
        root: the folder that holds the published lists and `images/`; the lists may be in `root/annotations`.
        sizes: number of images by split name, drawn stratified by label.
        num_classes: 14.
        image_shape: (3, h, w); images of another size are scaled and their middle is cut out.
        seed: seed of the splits.
        augment: whether `train` has random crops (padding an eighth of the height) and horizontal flips.
        max_memory_gb: the most memory for decoded images, in 10^9 bytes; if all images fit, they are decoded once.
        num_threads: number of threads that decode images.

    Raises:
        ConfigError: a list is missing or does not fit the others; or the options do not fit the data.

    Source: Xiao et al. 2015, Learning from Massive Noisy Labeled Data for Image Classification.
    """

    num_classes: Count = 14
    image_shape: Shape = (3, 224, 224)
    seed: Seed = 0
    augment: bool = True

    def __post_init__(self) -> None:
        self._check_rgb()
        splits.check_splits(self.sizes, tuple(FILES))
        parts: dict[str, Part] = {}
        for name in self.sizes:
            part = self._read(*FILES[name])
            self._check_part(part)
            parts |= self._parts(part, [name])
        augmentation = CropAndFlip(padding=self.image_shape[1] // 8) if self.augment else None
        self._keep(parts, image_data.IMAGENET, augmentation)
        self._load()

    def _read(self, keys_name: str, labels_name: str) -> Part:
        labels, keys = dict(line.split() for line in self._lines(labels_name)), self._lines(keys_name)
        for key in keys:
            expected = f"the keys of {labels_name}, which has a label of each"
            require(key in labels, f"data.root: {keys_name}", key, expected, "Unpack the published lists again.")
        return self._part([self.folder / key for key in keys], [int(labels[key]) for key in keys])

    def _lines(self, name: str) -> Sequence[str]:
        paths = [path for path in (self.folder / name, self.folder / "annotations" / name) if path.is_file()]
        expected = (
            f"a folder with {name} and the other published lists ({{noisy_train,clean_train,clean_val,clean_test}}_key_"
            "list.txt, {noisy,clean}_label_kv.txt) beside images/"
        )
        advice = "Ask its authors for the data (https://github.com/Cysu/noisy_label), and set data.root to its folder."
        require(bool(paths), "data.root", self.root, expected, advice)
        return [line for line in paths[0].read_text(encoding="utf-8").splitlines() if line.strip()]
