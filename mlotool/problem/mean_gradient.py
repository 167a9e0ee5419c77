"""The gradient of a step with its graph, for hypergradients that differentiate the step later."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlotool.problem.interface import Reduce, Vector


def mean_gradient(
    slopes: Sequence[Sequence[Tensor | None]], theta: Vector, reduce: Reduce
) -> tuple[list[list[Tensor]], list[Tensor | None]]:
    """Return the gradient on each batch with zeros where it is unused, and their mean over batches and ranks.

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
