"""The handwritten digits that come with scikit-learn, without a download: as images, two domains, or few-shot tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Rounds, Shape, Share, target
from mlotool.data import image_data, splits
from mlotool.data.image_data import InMemoryDataset, Part
from mlotool.data.splits import InMemoryTensors

NORMALIZATION = image_data.Normalization(mean=[0.3053], std=[0.3760], max_value=16.0)


@target("data")
@dataclass(eq=False)
class Digits(image_data.AbstractImageData):
    """1,797 handwritten digits of 8 x 8 pixels with 17 gray levels; 174 to 183 per class, no published test part.

    Args:
        sizes: number of samples by split name; all splits are drawn from the 1,797.
        num_classes: 10.
        image_shape: (1, 8, 8).
        seed: seed of splits and noise.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None; see
            `long_tail_counts`.
        label_noise: wrong labels in `train`, `{kind: uniform | flip, rate: 0 .. 1}`, or None; see `corrupt_labels`.
        augment: whether `train` has random crops (padding 1).

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (UCI), its test part.

    Example:
        >>> data = Digits({"train": 1000, "meta": 100, "val": 200, "test": 497})
        >>> len(data.split("train")), data.split("meta")[0]["input"].shape
        (1000, torch.Size([1, 8, 8]))
    """

    num_classes: Count = 10
    image_shape: Shape = (1, 8, 8)
    augment: bool = False

    def __post_init__(self) -> None:
        augmentation = image_data.CropAndFlip(padding=1, flip=False) if self.augment else None
        self._split(read_digits(), None, NORMALIZATION, augmentation)


def read_digits() -> Part:
    """Return all digits, uint8 from 0 to 16, in tensors of the caller's own."""
    images, target = _parsed()
    return Part(images.clone(), target.clone())


@cache
def _parsed() -> tuple[Tensor, Tensor]:
    """Return the file's digits: parsing it takes longer than all else that a run's data take."""
    from sklearn.datasets import load_digits  # takes most of a second to import

    digits = load_digits()
    return torch.from_numpy(digits.images).to(torch.uint8)[:, None], torch.from_numpy(digits.target).long()


Shift = Literal["turn", "invert", "noise"]
MAX_PIXEL = 16
NOISE_STD = 5.0


@target("data")
@dataclass(eq=False)
class TwoDomains(image_data.AbstractTwoDomains):
    """scikit-learn's digits as the source domain, and changed ones as the target domain; each image is used once.

    Batches are those of `InMemoryDataset` with `"domain": (b,) int64`, which is 1 for samples of the target domain.
    With `target_share`, some samples of `pretrain` are of the target domain; learned weights should find them.

    Args:
        sizes: number of samples of `pretrain`, `finetune`, `meta`, `val` and `test`, together at most 1,797.
        num_classes: 10.
        image_shape: (1, 8, 8).
        shift: how the target domain differs. `turn`: images are rotated by 180 degrees, so that a 6 looks like a 9 of
            the other domain, and pretraining harms; `invert`: black and white are exchanged; `noise`: Gaussian noise of
            a third of the range.
        target_share: fraction of `pretrain` that is of the target domain, from 0 to 1.
        seed: seed of the splits and of the noise.

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
        pools = splits.split_indices(digits.target, {"target": num_digits - num_source, "train": num_source}, self.seed)
        generator, share = np.random.default_rng([self.seed, 2]), self.target_share
        target = _moved(digits.at(pools["target"]), self.shift, 1.0, generator)
        source = _moved(digits.at(pools["train"]), self.shift, share, generator) if num_source else digits
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


# t: tasks, w: ways (classes of a task), k: shots (images of a class)

NUM_DIGITS = 10


@target("data")
@dataclass(eq=False)
class DigitsEpisodes(splits.AbstractShapedData[InMemoryTensors]):
    """Few-shot tasks (w-way, k-shot) from scikit-learn's digits; no class occurs in the tasks of two splits.

    A sample is a task, `{"support": {"input": (w k, 1, 8, 8) float32, "target": (w k,) int64}, "query": .., "classes":
    (w,)}`. `classes` are the digits that the task's labels 0 .. w - 1 stand for (plus 10 for rotated digits). No image
    is in both parts of a task. A batch has the tasks along its first axis.

    Args:
        sizes: number of tasks by split name.
        num_classes: w, the number of classes of a task.
        image_shape: (1, 8, 8).
        num_support: k, images per class in the support part of a task, from which the task is learned.
        num_query: images per class in the query part, on which the result is evaluated.
        classes: the digits of each split, disjoint; at least w digits per split, or half as many with `turn`.
        turn: whether each digit rotated by 90 degrees is another class (rotated by 180 degrees, a 6 would be a 9).
        seed: seed of the tasks; a split's tasks do not depend on the sizes of other splits.

    Source: Vinyals et al. 2016, Matching Networks, section 4.1 (the protocol, and new classes by rotation).

    Example:
        >>> data = DigitsEpisodes({"train": 20}, num_classes=3, classes={"train": [0, 1, 2, 3]})
        >>> data.split("train").__getitems__([0, 1])["support"]["input"].shape
        torch.Size([2, 15, 1, 8, 8])
    """

    num_classes: Count = 3
    image_shape: Shape = (1, 8, 8)
    num_support: Rounds = 5
    num_query: Rounds = 5
    classes: Mapping[str, Sequence[int]] | None = None
    turn: bool = True

    def __post_init__(self) -> None:
        self.classes = self.classes or {"train": (0, 1, 2, 3), "val": (4, 5, 6), "test": (7, 8, 9)}
        splits.check_splits(self.sizes, tuple(self.classes))
        _check_classes(self.classes, self.num_classes, self.turn)
        part = _with_turned(read_digits()) if self.turn else read_digits()
        self._images = InMemoryDataset(part.images, part.target, NORMALIZATION)
        self._check(self.num_classes, [1, 8, 8])
        self._hold(splits.drawn(self.sizes, self._draw_split))

    def _draw_split(self, size: int, name: str) -> InMemoryTensors:
        assert self.classes is not None
        classes = _class_list(self.classes[name], self.turn)
        generator, num_shots = np.random.default_rng([self.seed, *classes]), self.num_support + self.num_query
        by_class = {label: torch.nonzero(self._images.target == label).squeeze(1) for label in classes}
        chosen = torch.empty(size, self.num_classes, dtype=torch.int64)
        places = torch.empty(size, self.num_classes, num_shots, dtype=torch.int64)
        for task in range(size):
            chosen[task] = torch.from_numpy(generator.permutation(classes)[: self.num_classes])
            for way, label in enumerate(chosen[task].tolist()):
                chosen_places = generator.choice(len(by_class[label]), num_shots, replace=False)
                places[task, way] = by_class[label][torch.from_numpy(chosen_places)]
        parts = places.split([self.num_support, self.num_query], dim=-1)
        support, query = (_images_at(self._images, part) for part in parts)
        return InMemoryTensors({"support": support, "query": query, "classes": chosen})


def _images_at(images: InMemoryDataset, places: Tensor) -> dict[str, Tensor]:
    num_tasks, num_ways, num_shots = places.shape
    inputs = images.__getitems__(places.flatten())["input"]
    target = torch.arange(num_ways).repeat_interleave(num_shots).expand(num_tasks, -1)
    return {"input": inputs.unflatten(0, (num_tasks, num_ways * num_shots)), "target": target.contiguous()}


def _with_turned(part: Part) -> Part:
    assert isinstance(part.images, Tensor)
    images = torch.cat([part.images, part.images.rot90(1, dims=(2, 3))])
    return Part(images, torch.cat([part.target, part.target + NUM_DIGITS]))


def _class_list(digits: Sequence[int], turn: bool) -> list[int]:
    return [*digits, *(digit + NUM_DIGITS for digit in digits)] if turn else list(digits)


def _check_classes(classes: Mapping[str, Sequence[int]], num_ways: int, turn: bool) -> None:
    named = [digit for digits in classes.values() for digit in digits]
    is_right = len(set(named)) == len(named) and set(named) <= set(range(NUM_DIGITS))
    require(is_right, "data.classes", classes, "digits from 0 to 9, each in one split at most")
    for name, digits in classes.items():
        expected = f"at least data.num_classes={num_ways} classes, those of one task"
        require(len(_class_list(digits, turn)) >= num_ways, f"data.classes.{name}", digits, expected)
