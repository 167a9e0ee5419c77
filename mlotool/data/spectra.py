"""What the data sets of spectra share: pixels with many bands go in, normalised splits come out."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mlotool.core.settings import Count, Seed, Shape, Whole
from mlotool.data.in_memory_tensors import InMemoryTensors
from mlotool.data.splits import AbstractData, check_literal, check_splits, split_indices

# n: pixels, d: bands

SPLITS = ("train", "meta", "val", "test")


class AbstractSpectra(AbstractData[InMemoryTensors]):
    """Base of the data of spectra; a leaf reads or makes the pixels and hands them to this constructor.

    Batches are `{"input": (b, d) float32, "target": (b,) int64, "index": (b,)}`. Each band is shifted and scaled to a
    mean of 0 and a standard deviation of 1 over `train` (over all pixels where there is no train split).

    Args:
        pixels: (n, d) reflectances.
        target: (n,) int64.
        sizes: number of pixels by split name, drawn disjoint and stratified; see `split_indices`.
        num_classes: must be what the data has; it stands in the configuration so that models can refer to it.
        image_shape: (d,), the shape of one input; likewise.
        seed: of the splits.

    Raises:
        ConfigError: the options do not fit the data.
    """

    def __init__(
        self,
        pixels: Tensor,
        target: Tensor,
        sizes: Mapping[str, Whole],
        num_classes: Count,
        image_shape: Shape,
        seed: Seed,
    ) -> None:
        check_splits(sizes, SPLITS)
        check_literal("num_classes", num_classes, int(target.max()) + 1, "the number of classes that the data has")
        check_literal("image_shape", list(image_shape), [pixels.shape[1]], "the number of bands that the data has")
        self.num_classes = num_classes
        self.image_shape = tuple(image_shape)
        indices = split_indices(target, {name: int(size) for name, size in sizes.items()}, seed)
        inputs = _normalised(pixels, indices.get("train"))
        super().__init__(
            {
                name: InMemoryTensors({"input": inputs[indices[name]], "target": target[indices[name]]})
                for name in sizes
                if name in indices
            }
        )


def _normalised(pixels: Tensor, train: Tensor | None) -> Tensor:
    pixels = pixels.to(torch.float64)
    reference = pixels if train is None else pixels[train]
    std = reference.std(dim=0, correction=0)
    # A band that is the same everywhere stays 0.
    return ((pixels - reference.mean(dim=0)) / std.where(std > 0, torch.ones_like(std))).to(torch.float32)
