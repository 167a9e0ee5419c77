"""What all data objects share: published parts go in, the splits that a recipe asks for come out."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import Count, Seed, Shape, Share, Whole, checked
from mlotool.data.splits import AbstractData, check_splits, long_tail_indices, rows, split_indices

# n: images, c: channels, h, w: height and width, p: padding


class CropAndFlip:
    """Random crops of the zero-padded images, then (unless `flip` is false) a flip of every second one on average.

    Args:
        padding: pixels added on each side before the crop; offsets are uniform over `0 .. 2 * padding`.
        flip: whether images are flipped horizontally; digits must not be.

    Source: He et al. 2016, Deep Residual Learning for Image Recognition, section 4.2 (padding 4, CIFAR-10).

    Example:
        >>> images = torch.ones(2, 3, 32, 32, dtype=torch.uint8)
        >>> CropAndFlip()(images, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        self.padding = padding
        self.flip = flip

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return augmented images.

        Args:
            images: (n, c, h, w), any dtype; zero is what the border is filled with.
            generator: where the offsets and flips are drawn from; None: torch's global generator.

        Returns:
            (n, c, h, w), same dtype.
        """
        num_images, _, height, width = images.shape
        offsets = torch.randint(0, 2 * self.padding + 1, (2, num_images), generator=generator)
        cropped = _windows(F.pad(images, [self.padding] * 4).contiguous(), height, width, offsets)
        if not self.flip:
            return cropped
        chosen = torch.nonzero(torch.rand(num_images, generator=generator) < 0.5).squeeze(1)
        return cropped.index_copy_(0, chosen, cropped.index_select(0, chosen).flip(-1))


def _windows(images: Tensor, height: int, width: int, offsets: Tensor) -> Tensor:
    """Return one window of each image: (n, c, height, width), copied.

    Args:
        images: (n, c, h, w), contiguous.
        height: of a window.
        width: likewise.
        offsets: (2, n), rows above and columns before the window.
    """
    num_images, num_channels, num_rows, num_columns = images.shape
    plane = num_rows * num_columns
    # A window for each entry that one could begin at, all of them views of the same memory; only the chosen are copied.
    num_begins = images.numel() - (num_channels - 1) * plane - (height - 1) * num_columns - (width - 1)
    windows = images.as_strided((max(num_begins, 0), num_channels, height, width), (1, plane, num_columns, 1))
    begins = torch.arange(num_images) * num_channels * plane + offsets[0] * num_columns + offsets[1]
    return windows.index_select(0, begins)


# b: batch, c: channels, h, w: height and width


class AugmentedCopies:
    """Every sample has `num_copies` augmented images, always the same ones; a batch has one of them of each sample.

    Auxiliary variables that are stored by sample (`mlotool.layerparallel.Auxiliary`) need to meet the same image
    again, which random augmentation never does.

    Args:
        augmentation: that each copy has gone through once.
        num_copies: of each sample.

    Source: Sun et al. 2021, Layer-Parallel Training of Residual Networks with Auxiliary-Variable Networks, figure 4.

    Example:
        >>> copies = AugmentedCopies(CropAndFlip(1), num_copies=2)
        >>> images, index = torch.rand(3, 1, 4, 4), torch.tensor([5, 0, 2])
        >>> torch.equal(copies(images, index, torch.tensor([1, 0, 1])), copies(images, index, torch.tensor([1, 0, 1])))
        True
    """

    def __init__(self, augmentation: CropAndFlip, num_copies: int) -> None:
        self.augmentation = augmentation
        self.num_copies = num_copies

    @staticmethod
    def of(augmentation: CropAndFlip, augment: bool | int) -> "CropAndFlip | AugmentedCopies | None":
        """Return what a data set's setting asks for: none, new random images each time, or so many copies.

        Raises:
            ConfigError: the setting is a number below 1.
        """
        if isinstance(augment, bool):
            return augmentation if augment else None
        if augment < 1:
            raise ConfigError(
                f"data.augment: found {augment}; expected true, false, or a number of copies of at least 1. "
                "Correct data.augment."
            )
        return AugmentedCopies(augmentation, augment)

    def draw(self, size: int, generator: torch.Generator | None = None) -> Tensor:
        """Return which copy of each of so many samples comes, (b,) int64."""
        return torch.randint(self.num_copies, (size,), generator=generator)

    def __call__(self, images: Tensor, index: Tensor, copy: Tensor) -> Tensor:
        """Return the images of given copies.

        Args:
            images: (b, c, h, w), as they were read.
            index: (b,), the samples' positions in their split.
            copy: (b,), which one of each.
        """
        slots: Sequence[int] = (index * self.num_copies + copy).tolist()
        # A generator a copy: what it draws depends on no other sample, and on no order.
        found = [
            self.augmentation(image[None], torch.Generator().manual_seed(slot))
            for image, slot in zip(images, slots, strict=True)
        ]
        return torch.cat(found) if found else images


# n: images, b: batch, h, w: height and width


class ImageFiles:
    """JPEG or PNG files as RGB images of one size; another size is scaled and its middle cut out.

    Args:
        paths: n files.
        height: h in pixels.
        width: w in pixels.
        num_threads: that read and decode.
    """

    def __init__(self, paths: Sequence[Path], height: int, width: int, num_threads: int = 8) -> None:
        self.paths = list(paths)
        self.height = height
        self.width = width
        self.num_threads = num_threads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (n, 3, h, w)."""
        return (len(self.paths), 3, self.height, self.width)

    def subset(self, indices: Tensor) -> "ImageFiles":
        """Return the files at `indices`, undecoded."""
        return ImageFiles([self.paths[i] for i in indices.tolist()], self.height, self.width, self.num_threads)

    def load(self) -> Tensor:
        """Return all images, (n, 3, h, w) uint8."""
        return self[torch.arange(len(self.paths))]

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the images (b, 3, h, w) uint8 at `indices` (b,)."""
        pixels = np.empty((len(indices), self.height, self.width, 3), dtype=np.uint8)

        def decode(places: range) -> None:
            for place in places:
                pixels[place] = self._decode(self.paths[int(indices[place])])

        chunks = [range(start, len(indices), self.num_threads) for start in range(self.num_threads)]
        with ThreadPoolExecutor(self.num_threads) as executor:
            list(executor.map(decode, chunks))  # list(): raises what a thread raised
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def _decode(self, path: Path) -> np.ndarray:
        from PIL import Image, ImageOps

        with Image.open(path, formats=("JPEG", "PNG")) as file:
            image = file.convert("RGB")
        if image.size != (self.width, self.height):
            image = ImageOps.fit(image, (self.width, self.height), Image.Resampling.BILINEAR)
        return np.asarray(image)


# n: samples, b: batch, c: channels, h, w: height and width


@dataclass(frozen=True)
class Normalization:
    """`(pixel / max_value - mean) / std`, with one mean and std a channel.

    Args:
        mean: of `pixel / max_value`, one a channel.
        std: of `pixel / max_value`, one a channel.
        max_value: the value of a white pixel.
    """

    mean: Sequence[float]
    std: Sequence[float]
    max_value: float = 255.0


class InMemoryDataset(Dataset[dict[str, Tensor]]):
    """One split: images as they were read, labels, and what is done to a batch on its way out.

    Batches are `{"input": (b, c, h, w) float32, "target": (b,) int64, "index": (b,) int64}`, where `index` is the
    sample's position in this split, `"clean_target": (b,) int64` where labels were corrupted, and what `extra` names.

    Randomness: where `seeded` is true (there is an augmentation), pass `seed` to `__getitems__`, one that depends on
    the run's seed, the epoch and the batch's number: the same seed gives the same batch, on any worker and after a
    resume. Without it the augmentation draws from torch's global generator.

    Args:
        images: (n, c, h, w), kept in their own dtype: uint8 takes a quarter of the memory of float32. Or files that
            are decoded batch by batch.
        target: (n,) int64.
        normalization: applied to each batch, after the augmentation.
        clean_target: (n,) int64, the labels before they were corrupted; None: they were not.
        augmentation: applied to each batch; None: none. Of `AugmentedCopies` the batch says which ones it has:
            `"copy": (b,) int64`.
        extra: (n, ...) tensors by name, what else the batches shall hold of each sample.

    Example:
        >>> dataset = InMemoryDataset(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 2]), Normalization([0.5], [0.5]))
        >>> dataset.__getitems__([2, 0])["target"]
        tensor([2, 0])
    """

    def __init__(
        self,
        images: Tensor | ImageFiles,
        target: Tensor,
        normalization: Normalization,
        *,
        clean_target: Tensor | None = None,
        augmentation: CropAndFlip | AugmentedCopies | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        assert images.shape[0] == len(target), (images.shape, target.shape)
        self.images = images
        self.target = target
        self.clean_target = clean_target
        self.normalization = normalization
        self.augmentation = augmentation
        self.extra = dict(extra or {})
        mean, std = torch.tensor(normalization.mean), torch.tensor(normalization.std)
        self._scale = (1 / (normalization.max_value * std))[:, None, None]
        self._shift = (-mean / std)[:, None, None]

    @property
    def seeded(self) -> bool:
        """Whether `__getitems__` makes use of a seed."""
        return self.augmentation is not None

    def without_augmentation(self) -> "InMemoryDataset":
        """Return the same samples as they are: for evaluations and analyses of a train split."""
        return InMemoryDataset(
            self.images, self.target, self.normalization, clean_target=self.clean_target, extra=self.extra
        )

    def load(self) -> None:
        """Decode images that are files, once and for all."""
        if isinstance(self.images, ImageFiles):
            self.images = self.images.load()

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, without the batch's axis."""
        return {name: values[0] for name, values in self.__getitems__([range(len(self))[index]]).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor, seed: int | None = None) -> dict[str, Tensor]:
        """Return a collated batch.

        Args:
            indices: (b,) positions in this split.
            seed: of the augmentation; None: torch's global generator.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        batch = {**self._inputs(index, seed), "target": rows(self.target, index), "index": index}
        if self.clean_target is not None:
            batch["clean_target"] = rows(self.clean_target, index)
        return batch | {name: rows(values, index) for name, values in self.extra.items()}

    def _inputs(self, index: Tensor, seed: int | None) -> dict[str, Tensor]:
        images, more = rows(self.images, index), {}
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if isinstance(self.augmentation, AugmentedCopies):
            more["copy"] = self.augmentation.draw(len(index), generator)
            images = self.augmentation(images, index, more["copy"])
        elif self.augmentation is not None:
            images = self.augmentation(images, generator)
        return {"input": images.to(torch.float32).mul_(self._scale).add_(self._shift), **more}


class LabelNoise(TypedDict):
    """How labels are made wrong: see `corrupt_labels`."""

    kind: Literal["uniform", "flip"]
    rate: Share


@checked
def corrupt_labels(
    target: Tensor, num_classes: Count, *, kind: Literal["uniform", "flip"], rate: Share, seed: Seed
) -> Tensor:
    """Return labels of which some are replaced, each independently with probability `rate`.

    - `uniform`: by a label drawn uniformly from ALL classes, its own included, as in Meta-Weight-Net; the share of
      wrong labels is then `rate * (1 - 1 / num_classes)`: rate 0.4 makes 36% of ten classes' labels wrong.
    - `flip`: by the one other class that belongs to its class, drawn once for the whole data set; the share of wrong
      labels is `rate`.

    Args:
        target: (n,) int64 clean labels; left as they are.
        num_classes: at least 2.
        kind: `uniform` or `flip`.
        rate: from 0 to 1.
        seed: 0 or more.

    Returns:
        (n,) int64.

    Source: Shu et al. 2019, Meta-Weight-Net, section 4.2 (there flip noise goes to two other classes, here to one, the
    variant of Patrini et al. 2017).

    Example:
        >>> corrupt_labels(torch.zeros(4, dtype=torch.int64), 2, kind="flip", rate=1.0, seed=0)
        tensor([1, 1, 1, 1])
    """
    # [seed, 1]: a stream of its own, independent of the split's [seed, 0].
    generator = np.random.default_rng([seed, 1])
    is_replaced = torch.from_numpy(generator.random(len(target)) < rate)
    if kind == "uniform":
        replacement = torch.from_numpy(generator.integers(0, num_classes, len(target)))
    else:
        # A shift by 1 .. C - 1 never returns to the class itself.
        shifts = torch.from_numpy(generator.integers(1, num_classes, num_classes))
        replacement = (target + shifts[target]) % num_classes
    return torch.where(is_replaced, replacement, target)


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


TWO_DOMAINS_SPLITS = ("pretrain", "finetune", "meta", "val", "test")


class AbstractTwoDomains(AbstractData[InMemoryDataset]):
    """Base of the data with two domains: `pretrain` is of the source domain, all other splits are of the target one.

    `meta` is for a problem above the finetuning that shall not read its samples; Bai et al. 2021, and Betty's paper
    after them, let both read `finetune`.

    Args:
        source: samples of the source domain.
        target: samples of the target domain, with the same classes.
        sizes: number of samples by split name, out of TWO_DOMAINS_SPLITS.
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
        check_splits(sizes, TWO_DOMAINS_SPLITS)
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
