"""Few-shot classification: each sample is a task of its own, to tell a few kinds of digits apart."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Rounds, Seed, Shape, Whole, target
from mlotool.data.digits import NORMALIZATION, read_digits
from mlotool.data.image_data import InMemoryDataset, Part
from mlotool.data.splits import AbstractData, InMemoryTensors, check_literal, check_splits, drawn

# t: tasks, w: ways (classes of a task), k: shots (images of a class)

NUM_DIGITS = 10


@target("data")
class DigitsEpisodes(AbstractData[InMemoryTensors]):
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

    def __init__(
        self,
        sizes: Mapping[str, Whole],
        num_classes: Count = 3,
        image_shape: Shape = (1, 8, 8),
        num_support: Rounds = 5,
        num_query: Rounds = 5,
        classes: Mapping[str, Sequence[int]] | None = None,
        turn: bool = True,
        seed: Seed = 0,
    ) -> None:
        classes = classes or {"train": (0, 1, 2, 3), "val": (4, 5, 6), "test": (7, 8, 9)}
        check_literal("image_shape", list(image_shape), [1, 8, 8], "the shape of the digits")
        check_splits(sizes, tuple(classes))
        _check_classes(classes, num_classes, turn)
        self.num_classes = num_classes
        self.image_shape = (1, 8, 8)
        part = _with_turned(read_digits()) if turn else read_digits()
        images = InMemoryDataset(part.images, part.target, NORMALIZATION)
        by_class = [torch.nonzero(part.target == label).squeeze(1) for label in range(int(part.target.max()) + 1)]
        shape = (num_classes, num_support, num_query)
        super().__init__(
            drawn(
                sizes, lambda size, name: _draw(images, by_class, _class_list(classes[name], turn), size, shape, seed)
            )
        )


def _draw(
    images: InMemoryDataset,
    by_class: list[Tensor],
    classes: list[int],
    size: int,
    shape: tuple[int, int, int],
    seed: int,
) -> InMemoryTensors:
    num_ways, num_support, num_query = shape
    generator = np.random.default_rng([seed, *classes])
    chosen = torch.empty(size, num_ways, dtype=torch.int64)
    places = torch.empty(size, num_ways, num_support + num_query, dtype=torch.int64)
    for task in range(size):
        chosen[task] = torch.from_numpy(generator.permutation(classes)[:num_ways])
        for way, label in enumerate(chosen[task].tolist()):
            chosen_places = generator.choice(len(by_class[label]), num_support + num_query, replace=False)
            places[task, way] = by_class[label][torch.from_numpy(chosen_places)]
    support, query = (_images_at(images, part) for part in places.split([num_support, num_query], dim=-1))
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
    if len(set(named)) < len(named) or not set(named) <= set(range(NUM_DIGITS)):
        raise ConfigError(
            f"data.classes={ {name: list(digits) for name, digits in classes.items()} }; expected digits from 0 to 9, "
            "each in one split at most. Set data.classes='{train: [0,1,2,3], val: [4,5,6], test: [7,8,9]}'."
        )
    for name, digits in classes.items():
        num_found = len(_class_list(digits, turn))
        if num_found < num_ways:
            raise ConfigError(
                f"data.classes.{name} has {num_found} classes; expected at least data.num_classes={num_ways}, the "
                f"classes of one task. Lower data.num_classes, or add digits to data.classes.{name}."
            )
