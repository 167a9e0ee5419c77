"""OfficeHome: the same 65 kinds of things as paintings, cliparts, product pictures and photographs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import Count, NonNegative, Seed, Shape, Threads, Whole, target
from mlotool.data.image_data import AbstractTwoDomains, CropAndFlip, Normalization, load_images
from mlotool.data.image_folder import check_rgb, find_images

# As most read them; the published folder of the last is "Real World".
Domain = Literal["Art", "Clipart", "Product", "RealWorld"]


@target("data")
class OfficeHome(AbstractTwoDomains):
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

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        source: Domain = "Art",
        target: Domain = "Clipart",
        num_classes: Count = 65,
        image_shape: Shape = (3, 224, 224),
        seed: Seed = 0,
        augment: bool = True,
        max_memory_gb: NonNegative = 4.0,
        num_threads: Threads = 8,
    ) -> None:
        check_rgb(image_shape)
        folders = {domain: _find_domain(root, domain) for domain in (source, target)}
        classes: dict[str, list[str]] = {
            domain: sorted(path.name for path in folders[domain].iterdir() if path.is_dir()) for domain in folders
        }
        _check_classes(root, source, target, classes)
        parts = {
            domain: find_images(folder, classes[domain], image_shape, num_threads) for domain, folder in folders.items()
        }
        super().__init__(
            parts[source],
            parts[target],
            sizes,
            num_classes,
            image_shape,
            seed,
            Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
            CropAndFlip(padding=image_shape[1] // 8) if augment else None,
        )
        load_images(self, max_memory_gb)


def _find_domain(root: str, domain: str) -> Path:
    names = ["Real World", "Real_World", "RealWorld"] if domain == "RealWorld" else [domain]
    folders = [at_home(root) / name for name in names]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"data.root={root}: OfficeHome has no folder {folders[0]}; expected {folders[0]}/<class>/*.jpg. Download "
        "OfficeHomeDataset from https://www.hemanthdv.org/officeHomeDataset.html, unpack it, and set data.root to the "
        "folder that holds Art/, Clipart/, Product/ and Real World/."
    )


def _check_classes(root: str, source: str, target: str, classes: Mapping[str, list[str]]) -> None:
    differing = sorted(set(classes[source]) ^ set(classes[target]))
    if differing or not classes[source]:
        found = f"the classes {', '.join(differing)} are only in one of them" if differing else "there are no classes"
        raise ConfigError(
            f"data.root={root}: of the domains {source} and {target}, {found}; expected the same class folders in "
            "both. Unpack the published data set again."
        )
