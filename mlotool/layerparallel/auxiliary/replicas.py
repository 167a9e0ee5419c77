"""The workers of the same stages on other parts of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Replicas:
    """This worker's place among those of its stages.

    Args:
        number: of this one, and of its part of the batch.
        count: how many there are; 1 talks to nobody.
        group: their processes; None is all that there are.
    """

    def __init__(self, number: int = 0, count: int = 1, group: Any = None) -> None:
        self.number = number
        self.count = count
        self._group = group

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the means over all, the same bits on all; the tensors stay as they are."""
        if self.count == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([each.detach().reshape(-1) for each in tensors])
        dist.all_reduce(flat, group=self._group)
        parts = flat.div_(self.count).split([each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of all parts of the batch, one part after the other.

        Args:
            tensors: of one number of rows, which may be another one elsewhere.
        """
        if self.count == 1:
            return list(tensors)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(tensors[0])]), group=self._group)
        most, found = max(int(size) for size in sizes), []
        for tensor in tensors:
            padded = tensor.new_zeros(most, *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in range(self.count)]
            dist.all_gather(parts, padded, group=self._group)
            found.append(torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)]))
        return found
