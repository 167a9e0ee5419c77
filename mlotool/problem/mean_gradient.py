"""The gradient of a step over several batches."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.problem.rank_mean import RankMean


def averaged(
    found: Iterable[tuple[LossOutput, Sequence[Tensor | None]]],
) -> tuple[LossOutput, list[Tensor | None]]:
    """Return the mean loss and gradient over batches, which are taken one at a time.

    Args:
        found: a loss and its gradient for each batch, at least one.
    """
    outputs: list[LossOutput] = []
    total: list[Tensor | None] = []
    for output, gradient in found:
        outputs.append(output)
        total = [*gradient] if len(outputs) == 1 else [_add(a, b) for a, b in zip(total, gradient, strict=True)]
    if len(outputs) == 1:
        return outputs[0], total
    return LossOutput.mean(outputs), [None if tensor is None else tensor / len(outputs) for tensor in total]


def mean_gradient(
    slopes: Sequence[Sequence[Tensor | None]], theta: Sequence[Tensor], ranks: RankMean
) -> list[Tensor | None]:
    """Return the mean over batches and ranks, as a function of what the gradients on the batches depend on.

    A parameter that no batch's loss depends on, on any rank, has None as its mean, as for the optimizer.

    Args:
        slopes: by batch, this rank's: one tensor a parameter; None where it is unused.
        theta: the parameters.
        ranks: their mean.
    """
    used = [any(each[index] is not None for each in slopes) for index in range(len(theta))]
    total: list[Tensor] = []
    for batch in slopes:
        found = [torch.zeros_like(x) if each is None else each for x, each in zip(theta, batch, strict=True)]
        total = list(torch._foreach_add(total, found)) if total else found
    mean = [each / len(slopes) for each in total] if len(slopes) > 1 else total
    return ranks.gradient([value if flag else None for value, flag in zip(mean, used, strict=True)], theta)


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
