"""OfficeHome: the same 65 kinds of things as paintings, cliparts, product pictures and photographs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Shape, target
from mlotool.data import image_data, image_folder

# As most read them; the published folder of the last is "Real World".
Domain = Literal["Art", "Clipart", "Product", "RealWorld"]


@target("data")
@dataclass(eq=False)
class OfficeHome(image_data.AbstractTwoDomains, image_data.ImageFileData):
    """15,588 images in 65 classes and 4 domains, read from `root/<domain>/<class>/*.jpg`.

    Args:
        root: the folder that holds `Art/`, `Clipart/`, `Product/` and `Real World/` (or `Real_World/`, `RealWorld/`).
        sizes: number of images of `pretrain` (source domain) and of `finetune`, `meta`, `val` and `test` (target).
        source: the domain to pretrain on: `Art`, `Clipart`, `Product` or `RealWorld`.
        target: the domain to finetune and to test on.
        num_classes: 65.
        image_shape: (3, h, w); images of another size are scaled and their middle is cut out.
        seed: of the splits.
        augment: random crops (padding an eighth of the height) and horizontal flips for `pretrain` and `finetune`.
        max_memory_gb: decode all images into memory, once, where they take at most this, in 10^9 bytes.
        num_threads: that decode.

    Raises:
        ConfigError: a folder is not there; the domains differ in classes; the options do not fit the data.

    Source: Venkateswara et al. 2017, Deep Hashing Network for Unsupervised Domain Adaptation.
    """

    num_classes: Count = 65
    image_shape: Shape = (3, 224, 224)
    source: Domain = "Art"
    target: Domain = "Clipart"
    augment: bool = True

    def __post_init__(self) -> None:
        image_data.check_rgb(self.image_shape)
        folders = {domain: self._domain_folder(domain) for domain in (self.source, self.target)}
        classes = {
            domain: sorted(path.name for path in folder.iterdir() if path.is_dir())
            for domain, folder in folders.items()
        }
        image_folder.check_same_classes(self.root, self.source, self.target, classes[self.source], classes[self.target])
        parts = {
            domain: image_folder.find_images(folder, classes[domain], self.image_shape, self.num_threads)
            for domain, folder in folders.items()
        }
        augmentation = image_data.CropAndFlip(padding=self.image_shape[1] // 8) if self.augment else None
        self._split(parts[self.source], parts[self.target], image_data.IMAGENET, augmentation)
        image_data.load_images(self, self.max_memory_gb)

    def _domain_folder(self, domain: str) -> Path:
        names = ["Real World", "Real_World", "RealWorld"] if domain == "RealWorld" else [domain]
        for name in names:
            if (self.folder / name).is_dir():
                return self.folder / name
        raise ConfigError(
            f"data.root={self.root}: OfficeHome has no folder {self.folder / names[0]}; expected it with "
            "<class>/*.jpg. Download OfficeHomeDataset from https://www.hemanthdv.org/officeHomeDataset.html, unpack "
            "it, and set data.root to the folder that holds Art/, Clipart/, Product/ and Real World/."
        )
