"""What all data objects share: published parts go in, the splits that a recipe asks for come out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.data.augmentation import CropAndFlip
from mlotool.data.image_files import ImageFiles
from mlotool.data.in_memory import InMemoryDataset, Normalization
from mlotool.data.label_noise import check_label_noise, corrupt_labels
from mlotool.data.sampling import long_tail_indices, split_indices

# n: samples, c: channels, h, w: height and width


@dataclass(frozen=True)
class Part:
    """A published part of a data set: `images` (n, c, h, w) and `target` (n,) int64."""

    images: Tensor | ImageFiles
    target: Tensor

    def at(self, indices: Tensor) -> "Part":
        """Return the samples at `indices`, in that order."""
        images = self.images.subset(indices) if isinstance(self.images, ImageFiles) else self.images[indices]
        return Part(images, self.target[indices])


@dataclass(frozen=True)
class SplitOptions:
    """The keywords that every data object has.

    Args:
        sizes: number of samples by split name, before the long tail. `test` is drawn from the published test part
            where there is one; all others, and `test` where there is none, from the train part.
        num_classes: must be what the data has; it stands in the configuration so that models can refer to it.
        image_shape: (c, h, w); likewise.
        seed: of the splits and of the label noise: another seed is another data set.
        imbalance_factor: of the long tail of `train`, at least 1; None: as it is. See `long_tail_counts`.
        label_noise: `{kind: uniform | flip, rate: 0 .. 1}` for `train`; None: clean. See `corrupt_labels`.
    """

    sizes: Mapping[str, int]
    num_classes: int
    image_shape: Sequence[int]
    seed: int
    imbalance_factor: float | None
    label_noise: Mapping[str, Any] | None


class AbstractImageData:
    """Base of the data objects; a leaf reads its files and hands them to this constructor.

    Args:
        train: the published train part, or all there is.
        test: the published test part, or None.
        options: what the recipe asks for.
        normalization: of the inputs.
        augmentation: of `train`, or None.

    Raises:
        ConfigError: the options do not fit the data.
    """

    num_classes: int
    image_shape: tuple[int, ...]

    def __init__(
        self,
        train: Part,
        test: Part | None,
        options: SplitOptions,
        normalization: Normalization,
        augmentation: CropAndFlip | None = None,
    ) -> None:
        check_label_noise(options.label_noise)
        self.num_classes = _checked_num_classes(train, options)
        self.image_shape = _checked_image_shape(train, options)
        self._datasets = {
            name: InMemoryDataset(part.images, part.target, normalization)
            for name, part in _draw_splits(train, test, options).items()
        }
        if "train" in self._datasets:
            self._datasets["train"] = _make_train(self._datasets["train"], options, augmentation)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that have samples."""
        return tuple(self._datasets)

    def split(self, name: str) -> InMemoryDataset:
        """Return one split; only `train` is augmented, long-tailed and corrupted."""
        if name not in self._datasets:
            raise ConfigError(
                f"This data has no split '{name}'; expected one of {', '.join(self.splits)}."
                f"{did_you_mean(name, self.splits)} Name one of them, or give it samples with data.sizes.{name}=100."
            )
        return self._datasets[name]


def _draw_splits(train: Part, test: Part | None, options: SplitOptions) -> dict[str, Part]:
    sizes = {name: int(size) for name, size in options.sizes.items()}
    test_sizes = {"test": sizes.pop("test")} if test is not None and "test" in sizes else {}
    train_indices = split_indices(train.target, sizes, options.seed)
    parts = {name: train.at(indices) for name, indices in train_indices.items()}
    if test is not None:
        test_indices = split_indices(test.target, test_sizes, options.seed)
        parts.update((name, test.at(indices)) for name, indices in test_indices.items())
    return {name: parts[name] for name in options.sizes if name in parts}


def _make_train(dataset: InMemoryDataset, options: SplitOptions, augmentation: CropAndFlip | None) -> InMemoryDataset:
    part = Part(dataset.images, dataset.target)
    if options.imbalance_factor is not None:
        part = part.at(long_tail_indices(part.target, options.num_classes, options.imbalance_factor))
    target, clean_target = part.target, None
    if options.label_noise is not None:
        clean_target = target
        target = corrupt_labels(target, options.num_classes, seed=options.seed, **options.label_noise)
    return InMemoryDataset(
        part.images, target, dataset.normalization, clean_target=clean_target, augmentation=augmentation
    )


def _checked_num_classes(part: Part, options: SplitOptions) -> int:
    found = int(part.target.max()) + 1
    if options.num_classes != found:
        raise ConfigError(
            f"data.num_classes={options.num_classes}; expected {found}, the number of classes that the data has. "
            f"Set data.num_classes={found}."
        )
    return found


def _checked_image_shape(part: Part, options: SplitOptions) -> tuple[int, ...]:
    expected = tuple(part.images.shape[1:])
    if tuple(options.image_shape) != expected:
        text = f"[{','.join(map(str, expected))}]"
        raise ConfigError(
            f"data.image_shape={list(options.image_shape)}; expected {text} (channels, height, width), the shape of "
            f"the data's images. Set data.image_shape={text}."
        )
    return expected
