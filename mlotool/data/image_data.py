"""What all image data sets share: how published parts become the splits of a recipe."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Seed, Share, checked
from mlotool.data import splits
from mlotool.data.splits import AbstractShapedData, FromFiles, ImbalanceFactor, at

# n: images, c: channels, h, w: height and width, p: padding


class CropAndFlip:
    """Random crops of the zero-padded images, then, unless `flip` is false, horizontal flips with probability 1/2.

    Args:
        padding: pixels added on each side before the crop; offsets are uniform over `0 .. 2 * padding`.
        flip: whether images are flipped horizontally; use false for digits.

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
            images: (n, c, h, w), any dtype; the border is filled with zeros.
            generator: the generator of offsets and flips; None: torch's global generator.

        Returns:
            (n, c, h, w), same dtype.
        """
        num_images, _, height, width = images.shape
        rows, columns = torch.randint(0, 2 * self.padding + 1, (2, num_images), generator=generator)
        windows = F.pad(images, [self.padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
        cropped = windows[torch.arange(num_images), :, rows, columns]
        if not self.flip:
            return cropped
        chosen = torch.nonzero(torch.rand(num_images, generator=generator) < 0.5).squeeze(1)
        return cropped.index_copy_(0, chosen, cropped.index_select(0, chosen).flip(-1))


# b: batch, c: channels, h, w: height and width


class AugmentedCopies:
    """Each sample has `num_copies` augmented images, which stay the same; a batch has one of them per sample.

    Auxiliary variables that are stored by sample (`mlotool.layerparallel.Auxiliary`) need to meet the same image
    again, which random augmentation never does.

    Args:
        augmentation: the augmentation that makes each copy, once.
        num_copies: number of copies of each sample.

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
        """Return what a data set's setting asks for: none, new random images each time, or so many copies."""
        if isinstance(augment, bool):
            return augmentation if augment else None
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
        augmented = [
            self.augmentation(image[None], torch.Generator().manual_seed(slot))
            for image, slot in zip(images, slots, strict=True)
        ]
        return torch.cat(augmented) if augmented else images


# n: images, b: batch, h, w: height and width


@dataclass(eq=False, repr=False)
class ImageFiles:
    """JPEG or PNG files as RGB images of one size; images of another size are scaled, and their center is cut out.

    Args:
        paths: n files.
        height: h in pixels.
        width: w in pixels.
        num_threads: number of threads that read and decode.
    """

    paths: Sequence[Path]
    height: int
    width: int
    num_threads: int = 8

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (n, 3, h, w)."""
        return (len(self.paths), 3, self.height, self.width)

    def subset(self, indices: Tensor) -> "ImageFiles":
        """Return the files at `indices`, undecoded."""
        return replace(self, paths=[self.paths[i] for i in indices.tolist()])

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
    """`(pixel / max_value - mean) / std`, with one mean and std per channel.

    Args:
        mean: of `pixel / max_value`, one a channel.
        std: of `pixel / max_value`, one a channel.
        max_value: the value of a white pixel.
    """

    mean: Sequence[float]
    std: Sequence[float]
    max_value: float = 255.0


IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@dataclass(eq=False, repr=False)
class InMemoryDataset(Dataset[dict[str, Tensor]]):
    """One split: images as they were read, labels, and the processing of a batch.

    Batches are `{"input": (b, c, h, w) float32, "target": (b,) int64, "index": (b,) int64}`, where `index` is the
    sample's position in this split. If labels were corrupted, they also have `"clean_target": (b,) int64`, and further
    entries for `extra`.

    Randomness: if `seeded` is true (there is an augmentation), pass a `seed` to `__getitems__` that depends on the
    run's seed, the epoch and the number of the batch. The same seed gives the same batch, on any worker and after a
    resume. Without a seed, the augmentation draws from torch's global generator.

    Args:
        images: (n, c, h, w), kept in their dtype, since uint8 takes a quarter of the memory of float32; or files, which
            are decoded batch by batch.
        target: (n,) int64.
        normalization: applied to each batch, after the augmentation.
        clean_target: (n,) int64, the labels before they were corrupted; None: they were not corrupted.
        augmentation: applied to each batch; None: no augmentation. With `AugmentedCopies`, a batch also has the numbers
            of its copies, `"copy": (b,) int64`.
        extra: further entries of a batch: tensors (n, ...) by name.

    Example:
        >>> dataset = InMemoryDataset(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 2]), Normalization([0.5], [0.5]))
        >>> dataset.__getitems__([2, 0])["target"]
        tensor([2, 0])
    """

    images: Tensor | ImageFiles
    target: Tensor
    normalization: Normalization
    _: KW_ONLY
    clean_target: Tensor | None = None
    augmentation: CropAndFlip | AugmentedCopies | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.images.shape[0] == len(self.target), (self.images.shape, self.target.shape)
        mean, std = torch.tensor(self.normalization.mean), torch.tensor(self.normalization.std)
        self._scale = (1 / (self.normalization.max_value * std))[:, None, None]
        self._shift = (-mean / std)[:, None, None]

    @property
    def seeded(self) -> bool:
        """Whether `__getitems__` makes use of a seed."""
        return self.augmentation is not None

    def without_augmentation(self) -> "InMemoryDataset":
        """Return the same samples without augmentation, for evaluations and analyses of a train split."""
        return replace(self, augmentation=None)

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
        batch = {**self._inputs(index, seed), "target": at(self.target, index), "index": index}
        if self.clean_target is not None:
            batch["clean_target"] = at(self.clean_target, index)
        return batch | {name: at(values, index) for name, values in self.extra.items()}

    def _inputs(self, index: Tensor, seed: int | None) -> dict[str, Tensor]:
        images, more = at(self.images, index), {}
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
    """Return labels, some of which are replaced, each independently with probability `rate`.

    - `uniform`: by a label that is drawn uniformly from all classes, including the right one, as in Meta-Weight-Net.
      The fraction of wrong labels is then `rate * (1 - 1 / num_classes)`: with ten classes and rate 0.4, 36% are wrong.
    - `flip`: by one other class, which is drawn once for each class. The fraction of wrong labels is `rate`.

    Args:
        target: (n,) int64 clean labels; not changed.
        num_classes: at least 2.
        kind: `uniform` or `flip`.
        rate: from 0 to 1.
        seed: 0 or more.

    Returns:
        (n,) int64.

    Source: Shu et al. 2019, Meta-Weight-Net, section 4.2, where flip noise goes to two other classes; here it goes to
    one, as in Patrini et al. 2017.

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
    """A part of a data set: `images` (n, c, h, w), `target` (n,) int64, what else a sample has, its right label."""

    images: Tensor | ImageFiles
    target: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    clean_target: Tensor | None = None

    def at(self, indices: Tensor) -> "Part":
        """Return the samples at `indices`, in that order."""
        images = self.images.subset(indices) if isinstance(self.images, ImageFiles) else self.images[indices]
        return Part(images, self.target[indices], {name: values[indices] for name, values in self.extra.items()})


Augmentation = CropAndFlip | AugmentedCopies | None


class AbstractImages(AbstractShapedData[InMemoryDataset]):
    """Base class of image data; a subclass reads its files and calls a method of this class.

    Raises:
        ConfigError: the settings do not fit the data.
    """

    def _check_part(self, part: Part) -> None:
        self._check(int(part.target.max()) + 1, part.images.shape[1:])

    def _parts(self, part: Part, names: Iterable[str]) -> dict[str, Part]:
        return {name: part.at(indices) for name, indices in self._drawn(part.target, names).items()}

    def _keep(
        self,
        parts: Mapping[str, Part],
        normalization: Normalization,
        augmentation: Augmentation,
        augmented: Sequence[str] = ("train",),
    ) -> None:
        """Keep parts as the splits, of which those named are augmented."""
        datasets = {}
        for name in [name for name in self.sizes if name in parts]:
            used = augmentation if name in augmented else None
            datasets[name] = InMemoryDataset(normalization=normalization, augmentation=used, **vars(parts[name]))
        self._hold(datasets)


@dataclass(eq=False)
class AbstractImageData(AbstractImages):
    """Base class of image data with a train and a test part.

    Only the split `train` has augmentation, a long tail and wrong labels.

    Args:
        sizes: number of samples by split name, before a long tail is made. `test` is drawn from the published test
            part, if there is one; all other splits are drawn from the train part.
        imbalance_factor: factor between the most common and the rarest class of `train`, at least 1; None: classes stay
            as they are. See `long_tail_counts`.
        label_noise: wrong labels in `train`, `{kind: uniform | flip, rate: 0 .. 1}`; None: no wrong labels. See
            `corrupt_labels`.
    """

    seed: Seed = 0
    imbalance_factor: ImbalanceFactor | None = None
    label_noise: LabelNoise | None = None

    def _split(self, train: Part, test: Part | None, normalization: Normalization, augmentation: Augmentation) -> None:
        """Draw the splits from the published train part, or all there is, and the test part, if there is one."""
        self._check_part(train)
        of_test = {"test"} & set(self.sizes) if test is not None else set()
        parts = self._parts(train, [name for name in self.sizes if name not in of_test])
        if test is not None:
            parts |= self._parts(test, of_test)
        if "train" in parts:
            parts["train"] = self._made_uneven(parts["train"])
        self._keep(parts, normalization, augmentation)

    def _made_uneven(self, part: Part) -> Part:
        if self.imbalance_factor is not None:
            part = part.at(splits.long_tail_indices(part.target, self.num_classes, self.imbalance_factor))
        if self.label_noise is None:
            return part
        target = corrupt_labels(part.target, self.num_classes, seed=self.seed, **self.label_noise)
        return Part(part.images, target, part.extra, part.target)


@dataclass(eq=False)
class FromTorchvision(FromFiles):
    """Data whose files torchvision reads, after comparing their checksums with the published ones.

    Args:
        download: whether missing files are downloaded into `root`.
    """

    reader: ClassVar[str]
    """torchvision's name of the data."""

    download: bool = field(default=False, kw_only=True)

    def _published(self, files: str, instead: str = "") -> list[Any]:
        """Return torchvision's train and test part of the data.

        Args:
            files: what is expected, for the error.
            instead: what else can be done, for the error.

        Raises:
            ConfigError: the files are not there, or their checksums are not the published ones.
        """
        from torchvision import datasets  # takes a second to import

        reader = getattr(datasets, self.reader)
        try:
            return [reader(self.folder, train=is_train, download=self.download) for is_train in (True, False)]
        except (OSError, RuntimeError) as error:
            # torchvision goes on with advice in terms of its own arguments.
            reason = str(error).partition(" You can use ")[0].rstrip(".")
            raise ConfigError(
                f"data.root={self.root}: {self.reader} could not be read from {self.folder} ({reason}); "
                f"expected {files}. Set data.root to the folder that holds them, or data.download=true{instead}."
            ) from error


TWO_DOMAINS_SPLITS = ("pretrain", "finetune", "meta", "val", "test")


class AbstractTwoDomains(AbstractImages):
    """Base class of data with two domains: `pretrain` is of the source domain, all other splits of the target domain.

    `meta` is for an upper problem that should not use the samples of the fine-tuning problem. Bai et al. 2021 and
    Betty's paper use `finetune` for both.
    """

    def _split(
        self, source: Part, target: Part, normalization: Normalization, augmentation: CropAndFlip | None = None
    ) -> None:
        """Draw the splits from the samples of both domains, which have the same classes."""
        splits.check_splits(self.sizes, TWO_DOMAINS_SPLITS)
        self._check_part(target)
        parts = self._parts(target, [name for name in self.sizes if name != "pretrain"])
        parts |= self._parts(source, {"pretrain"} & set(self.sizes))
        self._keep(parts, normalization, augmentation, ("pretrain", "finetune"))
