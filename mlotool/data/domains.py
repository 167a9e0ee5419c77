"""Data with two domains: much of the one to pretrain on, some of the other to be good at."""

from collections.abc import Mapping

from mlotool.core.settings import Count, Seed, Shape, Whole
from mlotool.data.augmentation import CropAndFlip
from mlotool.data.image_data import Part, checked_image_shape, checked_num_classes, draw
from mlotool.data.in_memory import InMemoryDataset, Normalization
from mlotool.data.splits import AbstractData, check_splits

SPLITS = ("pretrain", "finetune", "meta", "val", "test")


class AbstractTwoDomains(AbstractData[InMemoryDataset]):
    """Base of the data with two domains: `pretrain` is of the source domain, all other splits are of the target one.

    `meta` is for a problem above the finetuning that shall not read its samples; Bai et al. 2021, and Betty's paper
    after them, let both read `finetune`.

    Args:
        source: samples of the source domain.
        target: samples of the target domain, with the same classes.
        sizes: number of samples by split name, out of SPLITS.
        num_classes: must be what the data has.
        image_shape: (c, h, w); likewise.
        seed: of the splits.
        normalization: of the inputs of both domains.
        augmentation: of `pretrain` and `finetune`, or None.

    Raises:
        ConfigError: the options do not fit the data.
    """

    image_shape: tuple[int, ...]

    def __init__(
        self,
        source: Part,
        target: Part,
        sizes: Mapping[str, Whole],
        num_classes: Count,
        image_shape: Shape,
        seed: Seed,
        normalization: Normalization,
        augmentation: CropAndFlip | None = None,
    ) -> None:
        check_splits(sizes, SPLITS)
        self.num_classes = checked_num_classes(target.target, num_classes)
        self.image_shape = checked_image_shape(target, image_shape)
        source_sizes = {name: size for name, size in sizes.items() if name == "pretrain"}
        target_sizes = {name: size for name, size in sizes.items() if name != "pretrain"}
        parts = draw(source, source_sizes, seed) | draw(target, target_sizes, seed)
        super().__init__(
            {
                name: InMemoryDataset(
                    parts[name].images,
                    parts[name].target,
                    normalization,
                    augmentation=augmentation if name in ("pretrain", "finetune") else None,
                    extra=parts[name].extra,
                )
                for name in sizes
                if name in parts
            }
        )
