"""Splits by name, which every data object has, and how samples are drawn for them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.private import tree_leaves, tree_map
from mlotool.core.settings import Count, Seed, Shape, Whole, checked
from mlotool.folders.files import at_home


def at(values: Any, index: Tensor) -> Tensor:
    """Return `values[index]`, which index_select reads up to twenty times as fast where a sample is large.

    Args:
        values: (n, ...) a tensor, or what stands for one (`ImageFiles`).
        index: (b,) int64, positions from 0 on.

    Example:
        >>> import torch
        >>> at(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1]))
        tensor([[2.],
                [2.]])
    """
    return values.index_select(0, index) if isinstance(values, Tensor) else values[index]


# n: samples, b: batch


class InMemoryTensors(Dataset[dict[str, Any]]):
    """One split: named tensors with the samples along their first axis, possibly nested in dicts.

    Batches have the same names, and also `"index": (b,) int64`, the samples' positions in this split.

    Args:
        values: tensors (n, ...), or dicts of such.

    Example:
        >>> dataset = InMemoryTensors({"input": torch.zeros(3, 2), "target": torch.tensor([0, 1, 2])})
        >>> dataset.__getitems__([2, 0])["target"]
        tensor([2, 0])
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        lengths = {len(leaf) for leaf in tree_leaves(self.values)}
        assert len(lengths) == 1, lengths
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample, without the batch's axis."""
        sample: dict[str, Any] = tree_map(lambda batch: batch[0], self.__getitems__([range(len(self))[index]]))
        return sample

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Any]:
        """Return a collated batch of the samples at `indices` (b,)."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return {**tree_map(lambda values: at(values, index), self.values), "index": index}


D = TypeVar("D", bound=Dataset[dict[str, Any]])
Sizes = Mapping[str, Whole]
# Samples of the most common class over those of the rarest.
ImbalanceFactor = Annotated[float, Ge(1)]


class AbstractData(Generic[D]):
    """Base class of data objects; a subclass makes the splits, and sets `num_classes` and other sizes for models.

    Args:
        datasets: the data sets by split name, in the order in which `splits` lists them.
    """

    num_classes: int

    def __init__(self, datasets: Mapping[str, D]) -> None:
        self._datasets = dict(datasets)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that have samples."""
        return tuple(self._datasets)

    def split(self, name: str) -> D:
        """Return one split."""
        require_known("split", name, self.splits, f" Or give it samples with data.sizes.{name}=100.")
        return self._datasets[name]


@dataclass(eq=False)
class AbstractShapedData(AbstractData[D]):
    """Base class of data for classification and regression, with their common settings.

    Args:
        sizes: number of samples by split name.
        num_classes: must be the number of classes of the data; models refer to it in the configuration.
        image_shape: shape of one input; models refer to it too.
        seed: seed of the splits and of random parts of the samples; another seed is another data set.
    """

    sizes: Sizes
    num_classes: Count
    image_shape: Shape
    seed: Seed = field(default=0, kw_only=True)

    def _check(self, num_classes: int, image_shape: Sequence[int]) -> None:
        """Raise ConfigError unless the settings that models refer to are the data's own."""
        check_literal("num_classes", self.num_classes, num_classes, "the number of classes that the data has")
        check_literal("image_shape", list(self.image_shape), list(image_shape), "the shape of its inputs")
        self.image_shape = tuple(image_shape)

    def _hold(self, datasets: Mapping[str, D]) -> None:
        """Keep the splits."""
        super().__init__(datasets)

    def _drawn(self, target: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the samples of disjoint, stratified splits; see `split_indices`."""
        return split_indices(target, {name: int(self.sizes[name]) for name in names}, self.seed)


@dataclass(eq=False)
class FromFiles:
    """Base class of data that is read from files on this machine.

    Args:
        root: the folder with the files.
    """

    root: str

    @property
    def folder(self) -> Path:
        """The folder, with `~` resolved."""
        return at_home(self.root)


def drawn(sizes: Mapping[str, int], draw: Callable[[int, str], D]) -> dict[str, D]:
    """Return the splits that have samples, each drawn by itself.

    Args:
        sizes: number of samples by split name.
        draw: makes a split of a size and a name.
    """
    return {name: draw(int(size), name) for name, size in sizes.items() if size > 0}


def check_literal(key: str, given: Any, actual: Any, what: str) -> None:
    """Raise ConfigError unless a value that stands in the configuration, for models to refer to, is the data's own."""
    if given != actual:
        raise ConfigError(f"data.{key}={given}; expected {actual}, {what}. Set data.{key}={actual}.")


def check_splits(sizes: Mapping[str, float], allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless all splits that are asked for are ones that the data can have."""
    for name in sizes:
        require_known("data.sizes", name, allowed)


def require_known(key: str, name: str, known: Sequence[str], advice: str = "") -> None:
    """Raise ConfigError unless a name is one of those that are known."""
    hint = did_you_mean(name, known) or " Correct the name."
    require(name in known, key, name, f"some of {', '.join(known)}", f"{hint.strip()}{advice}")


def split_indices(target: Tensor, sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    """Draw disjoint, stratified splits.

    The samples are shuffled and sorted so that any consecutive samples contain the classes in the proportions of the
    whole, to within one sample per class. Each split takes consecutive samples. `train` comes last, so the other splits
    do not change with its size.

    Args:
        target: (n,) int64 labels.
        sizes: number of samples by split name; their sum is at most n.
        seed: seed of the shuffle, 0 or more.

    Returns:
        Positions in `target` by split name, int64; a split of size 0 is left out.

    Raises:
        ConfigError: the sizes add up to more than n.

    Example:
        >>> splits = split_indices(torch.arange(10) % 2, {"train": 6, "val": 4}, seed=0)
        >>> [(name, len(indices)) for name, indices in splits.items()]
        [('val', 4), ('train', 6)]
    """
    expected = f"at most {len(target)} samples, which is all there are"
    require(sum(sizes.values()) <= len(target), "data.sizes", dict(sizes), expected, "Lower data.sizes.")
    order = _stratified_order(target, seed)
    splits, start = {}, 0
    for name in sorted(sizes, key=lambda name: (name == "train", name)):
        if sizes[name] > 0:
            splits[name] = order[start : start + sizes[name]]
            start += sizes[name]
    return splits


@checked
def long_tail_counts(class_counts: Tensor, imbalance_factor: ImbalanceFactor) -> Tensor:
    """Return how many samples each class keeps in a long tail.

        n_c = floor(n_max * IF^(-c / (C - 1))),   c = 0 .. C - 1

    So class 0 is the most common, and class C - 1 has 1 / IF times as many samples. `n_max` is the largest number for
    which each class has enough samples; in a balanced data set, it is the number of samples of a class.

    Args:
        class_counts: (C,), the number of samples of each class.
        imbalance_factor: IF, at least 1, the size of the most common class divided by that of the rarest.

    Returns:
        (C,) int64, at least 1 for each class that has a sample.

    Source: Cui et al. 2019, Class-Balanced Loss, section 5.1; Shu et al. 2019, Meta-Weight-Net, section 4.1.

    Example:
        >>> long_tail_counts(torch.tensor([100, 100, 100]), 100.0)
        tensor([100,  10,   1])
    """
    num_classes = len(class_counts)
    exponents = torch.arange(num_classes, dtype=torch.float64) / max(num_classes - 1, 1)
    factors = torch.tensor(imbalance_factor, dtype=torch.float64) ** exponents
    # 1e-9: a count that is whole in exact arithmetic, such as 1024 * 1024^-0.4, may lie just below in floating point.
    num_max = torch.floor(class_counts * factors + 1e-9).min()
    counts = torch.floor(num_max / factors + 1e-9).to(torch.int64)
    return torch.minimum(counts.clamp_min(1), class_counts)


def long_tail_indices(target: Tensor, num_classes: int, imbalance_factor: float) -> Tensor:
    """Choose the samples of a long tail: of each class the first ones, as many as `long_tail_counts` returns.

    There is no seed, as `split_indices` has shuffled the samples. A larger factor keeps a subset of what a smaller one
    keeps.

    Args:
        target: (n,) int64 labels, in a random order.
        num_classes: C.
        imbalance_factor: at least 1; 1 balances the classes.

    Returns:
        Positions in `target`, ascending.
    """
    counts = long_tail_counts(torch.bincount(target, minlength=num_classes), imbalance_factor)
    return torch.nonzero(_rank_in_class(target) < counts[target]).squeeze(1)


def _stratified_order(target: Tensor, seed: int) -> Tensor:
    shuffled = torch.from_numpy(np.random.default_rng([seed, 0]).permutation(len(target)))
    labels = target[shuffled]
    # The r-th of the N samples of a class goes to the place (r + 1/2) / N of the way.
    places = (_rank_in_class(labels).to(torch.float64) + 0.5) / torch.bincount(labels)[labels]
    return shuffled[torch.argsort(places, stable=True)]


def _rank_in_class(target: Tensor) -> Tensor:
    """Return how many samples of its own class stand before each sample."""
    by_class = torch.argsort(target, stable=True)
    counts = torch.bincount(target)
    starts = torch.cumsum(counts, 0) - counts
    ranks = torch.empty_like(target)
    ranks[by_class] = torch.arange(len(target)) - starts[target[by_class]]
    return ranks
