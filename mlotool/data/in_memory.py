"""The dataset class of all embedded data, of tensors or of files: it hands out whole batches, already collated."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlotool.data.augmentation import AugmentedCopies, CropAndFlip
from mlotool.data.in_memory_tensors import rows

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
