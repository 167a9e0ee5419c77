"""The gradient of a step over several batches."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.problem.interface import Reduce, Vector


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
    slopes: Sequence[Sequence[Tensor | None]], theta: Vector, reduce: Reduce
) -> tuple[list[list[Tensor]], list[Tensor | None]]:
    """Return the gradient on each batch with zeros where it is unused, and their mean over batches and ranks.

    For hypergradients that differentiate the step later.

    A parameter that no batch's loss depends on has None as its mean, as for the optimizer.

    Args:
        slopes: by batch, one tensor a parameter; None where it is unused.
        theta: the parameters.
        reduce: mean over ranks.
    """
    used = [any(each[index] is not None for each in slopes) for index in range(len(theta))]
    found = [
        [torch.zeros_like(x) if each is None else each for x, each in zip(theta, batch, strict=True)]
        for batch in slopes
    ]
    total = found[0]
    for more in found[1:]:
        total = list(torch._foreach_add(total, more))
    mean = reduce([each / len(found) for each in total] if len(found) > 1 else total)
    return found, [value if flag else None for value, flag in zip(mean, used, strict=True)]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
