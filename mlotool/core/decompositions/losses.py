"""Losses, written out."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core.decompositions.precision import in_float32


@in_float32("cpu", "cuda")
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Return the mean of `w (x - y)^2`, over the sum of the weights where there are some."""
    square = (input - target).square()
    if weight is None:
        return _reduced(square, _of_old(size_average, reduce, reduction))
    weighted = weight * square
    how = _of_old(size_average, reduce, reduction)
    if how == "mean":
        return weighted.sum() / weight.expand_as(weighted).sum()
    return _reduced(weighted, how)


@in_float32("cpu", "cuda")
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Return the mean of `z^2 / 2` where `z = |x - y|` is at most delta, of `delta (z - delta / 2)` elsewhere."""
    difference = input - target
    # Where a branch is not taken, its derivative must be a number.
    size = difference.abs()
    found = torch.where(size <= delta, 0.5 * difference.square(), delta * (size - 0.5 * delta))
    if weight is None:
        return _reduced(found, reduction)
    found = weight * found
    return found.sum() / weight.expand_as(found).sum() if reduction == "mean" else _reduced(found, reduction)


@in_float32("cpu", "cuda")
def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the mean of `log(1 + exp(-y x))`."""
    return _reduced(-F.logsigmoid(target * input), _of_old(size_average, reduce, reduction))


@in_float32("cpu", "cuda")
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the mean over samples of `sum over j != y of w_y max(0, margin - x_y + x_j)^p / C`."""
    scores, labels = torch.atleast_2d(input), torch.atleast_1d(target)
    own = scores.gather(1, labels[:, None])
    excess = (margin - own + scores).clamp_min(0.0) ** p
    if weight is not None:
        excess = excess * weight[labels][:, None]
    is_other = torch.arange(scores.shape[1], device=scores.device) != labels[:, None]
    found = (excess * is_other).mean(1)
    return _reduced(found if input.dim() > 1 else found[0], _of_old(size_average, reduce, reduction))


@in_float32("cpu", "cuda")
def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the mean over samples of `sum over labels y, j no label, of max(0, 1 - x_y + x_j) / C`.

    Args:
        target: the labels of each sample, up to the first -1.
    """
    scores, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    is_label = (labels >= 0).cumprod(1).bool()
    labels = labels.clamp_min(0)
    is_other = torch.zeros_like(scores, dtype=torch.long).scatter_add(1, labels, is_label.long()) == 0
    margins = 1.0 - scores.gather(1, labels)[:, :, None] + scores[:, None, :]
    counted = is_label[:, :, None] & is_other[:, None, :]
    found = (margins.clamp_min(0.0) * counted).sum((1, 2)) / scores.shape[1]
    return _reduced(found if input.dim() > 1 else found[0], _of_old(size_average, reduce, reduction))


def linear_cross_entropy(*args: Tensor, options: object = None, **kwargs: Any) -> Tensor:
    """Return the cross entropy of `x W^T + b` whole: the parts that options cut it into have gradients alone."""
    return F.linear_cross_entropy(*args, **kwargs)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def _of_old(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    # Arguments that torch still takes.
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"
