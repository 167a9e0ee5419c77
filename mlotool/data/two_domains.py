"""Digits, and digits that look otherwise: two domains without a network."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Shape, Share, target
from mlotool.data.digits import NORMALIZATION, read_digits
from mlotool.data.image_data import AbstractTwoDomains, Part
from mlotool.data.splits import split_indices

Shift = Literal["turn", "invert", "noise"]
MAX_PIXEL = 16
NOISE_STD = 5.0


@target("data")
@dataclass(eq=False)
class TwoDomains(AbstractTwoDomains):
    """scikit-learn's digits as the source domain, changed ones as the target domain; each image is used once.

    Batches are those of `InMemoryDataset` with `"domain": (b,) int64`, 1 where a sample is of the target domain: some
    of `pretrain` can be, which are the ones that a reweighting should find.

    Args:
        sizes: number of samples of `pretrain`, `finetune`, `meta`, `val` and `test`, together at most 1,797.
        num_classes: 10.
        image_shape: (1, 8, 8).
        shift: how the target domain differs. `turn`: by 180 degrees, so that a source 6 is a target 9 and the source
            harms; `invert`: black on white; `noise`: Gaussian noise of a third of the range.
        target_share: share of `pretrain` that is of the target domain, from 0 to 1.
        seed: of the splits, and of the noise.

    Example:
        >>> data = TwoDomains({"pretrain": 900, "finetune": 50, "val": 197, "test": 600})
        >>> data.split("pretrain").extra["domain"].sum(), data.split("finetune").extra["domain"].sum()
        (tensor(0), tensor(50))
    """

    num_classes: Count = 10
    image_shape: Shape = (1, 8, 8)
    shift: Shift = "turn"
    target_share: Share = 0.0

    def __post_init__(self) -> None:
        digits = read_digits()
        num_digits, num_source = len(digits.target), int(self.sizes.get("pretrain", 0))
        expected = f"a number from 0 to {num_digits - 1}, as the other splits need some"
        require(num_source < num_digits, "data.sizes.pretrain", num_source, expected)
        # `train` comes last: what is left for the target domain is the same for every size of `pretrain`.
        pools = split_indices(digits.target, {"target": num_digits - num_source, "train": num_source}, self.seed)
        generator = np.random.default_rng([self.seed, 2])
        target = _moved(digits.at(pools["target"]), self.shift, 1.0, generator)
        source = digits
        if num_source:
            source = _moved(digits.at(pools["train"]), self.shift, self.target_share, generator)
        self._split(source, target, NORMALIZATION)


def _moved(part: Part, shift: str, share: float, generator: np.random.Generator) -> Part:
    """Change the first `share` of the samples, which are in a random and stratified order."""
    assert isinstance(part.images, Tensor)
    num_moved = round(share * len(part.target))
    images = torch.cat([_shifted(part.images[:num_moved], shift, generator), part.images[num_moved:]])
    domain = (torch.arange(len(part.target)) < num_moved).to(torch.int64)
    return Part(images, part.target, {"domain": domain})


def _shifted(images: Tensor, shift: str, generator: np.random.Generator) -> Tensor:
    if shift == "turn":
        return images.rot90(2, dims=(2, 3))
    if shift == "invert":
        return MAX_PIXEL - images
    noise = torch.from_numpy(generator.normal(0.0, NOISE_STD, tuple(images.shape)))
    return (images + noise).round().clamp(0, MAX_PIXEL).to(torch.uint8)
