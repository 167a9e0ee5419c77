"""Clothing1M: a million pictures of clothes with the labels that shops gave them, and some that were checked."""

from collections.abc import Mapping, Sequence

import torch

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import Count, NonNegative, Seed, Shape, Threads, Whole, target
from mlotool.data.image_data import (
    CropAndFlip,
    ImageFiles,
    InMemoryDataset,
    Normalization,
    Part,
    checked_num_classes,
    draw,
    load_images,
)
from mlotool.data.image_folder import check_rgb
from mlotool.data.splits import AbstractData, check_splits

# By split: the list of its images, and the labels.
FILES = {
    "train": ("noisy_train_key_list.txt", "noisy_label_kv.txt"),
    "meta": ("clean_train_key_list.txt", "clean_label_kv.txt"),
    "val": ("clean_val_key_list.txt", "clean_label_kv.txt"),
    "test": ("clean_test_key_list.txt", "clean_label_kv.txt"),
}


@target("data")
class Clothing1M(AbstractData[InMemoryDataset]):
    """1,000,000 images with noisy labels (38.5% wrong) and 47,570 + 14,313 + 10,526 with clean ones; 14 classes.

    `train` has the noisy labels, whose clean ones are not known; `meta`, `val` and `test` are the published clean
    train, val and test parts.

    Args:
        root: the folder that holds the published lists and `images/`; the lists may be in `root/annotations`.
        sizes: number of images by split name, drawn stratified by label.
        num_classes: 14.
        image_shape: (3, h, w); images of another size are scaled and their middle is cut out.
        seed: of the draws.
        augment: random crops (padding an eighth of the height) and horizontal flips for `train`.
        max_memory_gb: decode all images into memory, once, where they take at most this, in 10^9 bytes.
        num_threads: that decode.

    Raises:
        ConfigError: a list is not there or does not fit the other; the options do not fit the data.

    Source: Xiao et al. 2015, Learning from Massive Noisy Labeled Data for Image Classification.
    """

    image_shape: tuple[int, ...]

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        num_classes: Count = 14,
        image_shape: Shape = (3, 224, 224),
        seed: Seed = 0,
        augment: bool = True,
        max_memory_gb: NonNegative = 4.0,
        num_threads: Threads = 8,
    ) -> None:
        check_rgb(image_shape)
        check_splits(sizes, tuple(FILES))
        self.image_shape = tuple(image_shape)
        parts: dict[str, Part] = {}
        for name, size in sizes.items():
            part = _read(root, name, image_shape, num_threads)
            self.num_classes = checked_num_classes(part.target, num_classes)
            parts.update(draw(part, {name: size}, seed))
        augmentation = CropAndFlip(padding=image_shape[1] // 8) if augment else None
        normalization = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        super().__init__(
            {
                name: InMemoryDataset(
                    part.images, part.target, normalization, augmentation=augmentation if name == "train" else None
                )
                for name, part in parts.items()
            }
        )
        load_images(self, max_memory_gb)


def _read(root: str, split: str, image_shape: Sequence[int], num_threads: int) -> Part:
    keys_name, labels_name = FILES[split]
    labels = dict(line.split() for line in _lines(root, labels_name))
    keys = _lines(root, keys_name)
    for key in keys:
        if key not in labels:
            raise ConfigError(
                f"data.root={root}: {keys_name} names {key}, which {labels_name} does not; expected a label of each. "
                "Unpack the published lists again."
            )
    folder = at_home(root)
    files = ImageFiles([folder / key for key in keys], image_shape[1], image_shape[2], num_threads)
    return Part(files, torch.tensor([int(labels[key]) for key in keys]))


def _lines(root: str, name: str) -> list[str]:
    folder = at_home(root)
    for path in (folder / name, folder / "annotations" / name):
        if path.is_file():
            return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    raise ConfigError(
        f"data.root={root}: Clothing1M has no file {folder / name}; expected the published lists "
        "{noisy_train,clean_train,clean_val,clean_test}_key_list.txt and {noisy,clean}_label_kv.txt beside images/. "
        "Ask its authors for the data (https://github.com/Cysu/noisy_label), unpack it, and set data.root to "
        "its folder."
    )
