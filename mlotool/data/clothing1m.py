"""Clothing1M: a million pictures of clothes with the labels that shops gave them, and some that were checked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Shape, target
from mlotool.data import image_data
from mlotool.data.splits import check_splits

# By split: the list of its images, and the labels.
FILES = {
    "train": ("noisy_train_key_list.txt", "noisy_label_kv.txt"),
    "meta": ("clean_train_key_list.txt", "clean_label_kv.txt"),
    "val": ("clean_val_key_list.txt", "clean_label_kv.txt"),
    "test": ("clean_test_key_list.txt", "clean_label_kv.txt"),
}


@target("data")
@dataclass(eq=False)
class Clothing1M(image_data.AbstractImages, image_data.ImageFileData):
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

    num_classes: Count = 14
    image_shape: Shape = (3, 224, 224)
    augment: bool = True

    def __post_init__(self) -> None:
        image_data.check_rgb(self.image_shape)
        check_splits(self.sizes, tuple(FILES))
        parts: dict[str, image_data.Part] = {}
        for name in self.sizes:
            part = self._read(*FILES[name])
            self._check_part(part)
            parts |= self._parts(part, [name])
        augmentation = image_data.CropAndFlip(padding=self.image_shape[1] // 8) if self.augment else None
        self._keep(parts, image_data.IMAGENET, augmentation)
        image_data.load_images(self, self.max_memory_gb)

    def _read(self, keys_name: str, labels_name: str) -> image_data.Part:
        labels, keys = dict(line.split() for line in self._lines(labels_name)), self._lines(keys_name)
        for key in keys:
            expected = f"the keys of {labels_name}, which has a label of each"
            require(key in labels, f"data.root: {keys_name}", key, expected, "Unpack the published lists again.")
        height, width = self.image_shape[1:]
        files = image_data.ImageFiles([self.folder / key for key in keys], height, width, self.num_threads)
        return image_data.Part(files, torch.tensor([int(labels[key]) for key in keys]))

    def _lines(self, name: str) -> Sequence[str]:
        for path in (self.folder / name, self.folder / "annotations" / name):
            if path.is_file():
                return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise ConfigError(
            f"data.root={self.root}: Clothing1M has no file {self.folder / name}; expected the published lists "
            "{noisy_train,clean_train,clean_val,clean_test}_key_list.txt and {noisy,clean}_label_kv.txt beside "
            "images/. Ask its authors for the data (https://github.com/Cysu/noisy_label), unpack it, and set "
            "data.root to its folder."
        )
