"""Few-shot classification: each sample is a task of its own, to tell a few kinds of digits apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Rounds, Shape, target
from mlotool.data.digits import NORMALIZATION, read_digits
from mlotool.data.image_data import InMemoryDataset, Part
from mlotool.data.splits import AbstractShapedData, InMemoryTensors, check_splits, drawn

# t: tasks, w: ways (classes of a task), k: shots (images of a class)

NUM_DIGITS = 10


@target("data")
@dataclass(eq=False)
class DigitsEpisodes(AbstractShapedData[InMemoryTensors]):
    """w-way k-shot tasks out of scikit-learn's digits; no class is in the tasks of two splits.

    A sample is a task, `{"support": {"input": (w k, 1, 8, 8) float32, "target": (w k,) int64}, "query": ..}`, and
    `"classes"` (w,), the digits that its labels 0 .. w - 1 stand for (plus 10 where they are turned). No image is in
    both parts of a task. A batch has the tasks along its first axis.

    Args:
        sizes: number of tasks by split name.
        num_classes: w; models of a task have as many outputs.
        image_shape: (1, 8, 8).
        num_support: k, images of a class that a task is learned from.
        num_query: images of a class that the result is judged by.
        classes: the digits of each split, disjoint; at least w, or half of it with `turn`.
        turn: each digit turned by 90 degrees is a class too (by 180 degrees, a 6 would be a 9).
        seed: of the tasks; a split's tasks do not depend on the other splits' sizes.

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
        check_splits(self.sizes, tuple(self.classes))
        _check_classes(self.classes, self.num_classes, self.turn)
        part = _with_turned(read_digits()) if self.turn else read_digits()
        self._images = InMemoryDataset(part.images, part.target, NORMALIZATION)
        self._check(self.num_classes, [1, 8, 8])
        self._hold(drawn(self.sizes, self._draw_split))

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
