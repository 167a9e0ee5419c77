"""What all data objects share: published parts go in, the splits that a recipe asks for come out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.data.augmentation import AugmentedCopies, CropAndFlip
from mlotool.data.in_memory import ImageFiles, InMemoryDataset, Normalization
from mlotool.data.label_noise import LabelNoise, corrupt_labels
from mlotool.data.splits import AbstractData, long_tail_indices, split_indices

# n: samples, c: channels, h, w: height and width


@dataclass(frozen=True)
class Part:
    """A published part of a data set: `images` (n, c, h, w), `target` (n,) int64, what else a sample has (n, ..)."""

    images: Tensor | ImageFiles
    target: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def at(self, indices: Tensor) -> "Part":
        """Return the samples at `indices`, in that order."""
        images = self.images.subset(indices) if isinstance(self.images, ImageFiles) else self.images[indices]
        return Part(images, self.target[indices], {name: values[indices] for name, values in self.extra.items()})


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
    label_noise: LabelNoise | None


class AbstractImageData(AbstractData[InMemoryDataset]):
    """Base of the image data with a train and a test part; a leaf reads its files and hands them to this constructor.

    Only `train` is augmented, long-tailed and corrupted.

    Args:
        train: the published train part, or all there is.
        test: the published test part, or None.
        options: what the recipe asks for.
        normalization: of the inputs.
        augmentation: of `train`, or None.

    Raises:
        ConfigError: the options do not fit the data.
    """

    image_shape: tuple[int, ...]

    def __init__(
        self,
        train: Part,
        test: Part | None,
        options: SplitOptions,
        normalization: Normalization,
        augmentation: CropAndFlip | AugmentedCopies | None = None,
    ) -> None:
        self.num_classes = checked_num_classes(train.target, options.num_classes)
        self.image_shape = checked_image_shape(train, options.image_shape)
        datasets = {
            name: InMemoryDataset(part.images, part.target, normalization)
            for name, part in _draw_splits(train, test, options).items()
        }
        if "train" in datasets:
            datasets["train"] = _make_train(datasets["train"], options, augmentation)
        super().__init__(datasets)


def draw(part: Part, sizes: Mapping[str, int], seed: int) -> dict[str, Part]:
    """Draw disjoint, stratified splits from a part; see `split_indices`."""
    sizes = {name: int(size) for name, size in sizes.items()}
    return {name: part.at(indices) for name, indices in split_indices(part.target, sizes, seed).items()}


def load_images(data: AbstractData[InMemoryDataset], max_memory_gb: float) -> None:
    """Decode all images that are files, once and for all, if they take at most `max_memory_gb` as uint8."""
    datasets = [data.split(name) for name in data.splits]
    if sum(prod(dataset.images.shape) for dataset in datasets) <= max_memory_gb * 1e9:
        for dataset in datasets:
            dataset.load()


def _draw_splits(train: Part, test: Part | None, options: SplitOptions) -> dict[str, Part]:
    sizes = dict(options.sizes)
    test_sizes = {"test": sizes.pop("test")} if test is not None and "test" in sizes else {}
    parts = draw(train, sizes, options.seed)
    if test is not None:
        parts.update(draw(test, test_sizes, options.seed))
    return {name: parts[name] for name in options.sizes if name in parts}


def _make_train(
    dataset: InMemoryDataset, options: SplitOptions, augmentation: CropAndFlip | AugmentedCopies | None
) -> InMemoryDataset:
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


def checked_num_classes(target: Tensor, num_classes: int) -> int:
    """Return the number of classes; a ConfigError where the configuration says another one."""
    found = int(target.max()) + 1
    if num_classes != found:
        raise ConfigError(
            f"data.num_classes={num_classes}; expected {found}, the number of classes that the data has. "
            f"Set data.num_classes={found}."
        )
    return found


def checked_image_shape(part: Part, image_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an image; a ConfigError where the configuration says another one."""
    expected = tuple(part.images.shape[1:])
    if tuple(image_shape) != expected:
        text = f"[{','.join(map(str, expected))}]"
        raise ConfigError(
            f"data.image_shape={list(image_shape)}; expected {text} (channels, height, width), the shape of "
            f"the data's images. Set data.image_shape={text}."
        )
    return expected


def read_with_torchvision(reader: str, root: str, *, is_train: bool, download: bool, files: str, instead: str) -> Any:
    """Return torchvision's data set of this name.

    Args:
        reader: its name, such as `MNIST`.
        root: the folder that holds its folder.
        is_train: which of the two published parts.
        download: fetch the files into `root` where they are missing.
        files: what is expected, for the error.
        instead: what else can be done, for the error.

    Raises:
        ConfigError: the files are not there, or their checksums are not the published ones.
    """
    from torchvision import datasets  # takes a second to import

    folder = at_home(root)
    try:
        return getattr(datasets, reader)(folder, train=is_train, download=download)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"data.root={root}: {reader} could not be read from {folder} ({_reason(error)}); expected {files} there. "
            f"Set data.root to the folder that holds them, or data.download=true{instead}."
        ) from error


def _reason(error: Exception) -> str:
    # torchvision goes on with advice in terms of its own arguments: "You can use download=True to download it".
    return str(error).partition(" You can use ")[0].rstrip(".")
