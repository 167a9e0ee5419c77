"""Embeddings whose row for padding is a constant, and bags of embeddings, written out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core.decompositions.lacking import lacking_twice


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return the rows of `weight`; that at `padding_idx` has no tangent, as it has no gradient."""
    return _without_padding(F.embedding(input, weight, padding_idx, *args, **kwargs), input, weight, padding_idx)


def embedding_by_name(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    """Return the same; a negative `padding_idx` is none."""
    found = torch.embedding(weight, indices, padding_idx, *args, **kwargs)
    return _without_padding(found, indices, weight, None if padding_idx < 0 else padding_idx)


def _without_padding(rows: Tensor, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    if padding_idx is None:
        return rows
    return torch.where((indices == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def embedding_bag(*args: Any, **kwargs: Any) -> Tensor:
    """Return the sum, mean or maximum of the rows of each bag; zeros of an empty one."""
    return _Bags(*args, **kwargs).reduced()


@dataclass
class _Bags:
    """The arguments of `torch.nn.functional.embedding_bag`."""

    input: Tensor
    weight: Tensor
    offsets: Tensor | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    mode: str = "mean"
    sparse: bool = False
    per_sample_weights: Tensor | None = None
    include_last_offset: bool = False
    padding_idx: int | None = None

    def reduced(self) -> Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise lacking_twice("_embedding_bag with max_norm, scale_grad_by_freq or sparse")
        indices, (bags, count) = self.input.reshape(-1), self._bags()
        if not len(indices):
            return self.weight[:0].sum(0).expand(count, -1)
        rows = F.embedding(indices, self.weight, self.padding_idx)
        is_counted = torch.ones_like(bags, dtype=torch.bool)
        if self.padding_idx is not None:
            is_counted = indices != self.padding_idx % len(self.weight)
        if self.mode == "max":
            return _largest(rows, bags, is_counted, count)
        if self.per_sample_weights is not None:
            rows = rows * self.per_sample_weights.reshape(-1, 1)
        zeros = torch.zeros(count, rows.shape[1], dtype=rows.dtype, device=rows.device)
        found = zeros.index_add(0, bags, rows * is_counted[:, None])
        if self.mode == "sum":
            return found
        sizes = torch.zeros(count, dtype=torch.long, device=rows.device).index_add(0, bags, is_counted.long())
        return found / sizes.clamp_min(1)[:, None]

    def _bags(self) -> tuple[Tensor, int]:
        """Return the bag of each index, and how many bags there are."""
        device = self.input.device
        if self.input.dim() == 2:
            count, size = self.input.shape
            return torch.arange(count, device=device).repeat_interleave(size), count
        assert self.offsets is not None
        starts = self.offsets[:-1] if self.include_last_offset else self.offsets
        return torch.bucketize(torch.arange(len(self.input), device=device), starts, right=True) - 1, len(starts)


def _largest(rows: Tensor, bags: Tensor, is_counted: Tensor, count: int) -> Tensor:
    """Return the largest entry of each column among the rows of a bag; the first one where several are."""
    belongs = (bags == torch.arange(count, device=bags.device)[:, None]) & is_counted
    known = torch.where(belongs[:, :, None], rows.detach(), -torch.inf)
    return torch.where(belongs.any(1)[:, None], rows.gather(0, known.argmax(1)), 0.0)
