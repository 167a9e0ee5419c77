"""Wrong labels, put in on purpose."""

from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from mlotool.core.settings import Count, Seed, Share, checked


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
