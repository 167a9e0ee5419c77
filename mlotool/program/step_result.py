"""What a step of a problem yields to log."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.problem.problem import Problem


@dataclass(slots=True)
class StepResult:
    """What one step of a problem yields to log.

    Args:
        loss: 0-D, detached; the mean over accumulated batches, and over tasks.
        metrics: 0-D tensors by name, detached; `gradient_norm` where the gradient is clipped, before it is;
            `hypergradient_norm`, of the total gradient, before clipping too, where it passes through solutions and the
            schedule is asked for it.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


def norm_of(problem: Problem, gradient: Sequence[Tensor | None]) -> Tensor | None:
    """Return the norm of a gradient, of which nothing is read from the device; None of an overflow in fp16."""
    tensors = [tensor for tensor in gradient if tensor is not None]
    if not tensors:
        return None
    norms = torch._foreach_norm(tensors)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    norm = norm.detach()
    return norm if problem.loss_scale is None or math.isfinite(norm) else None


def result_of(
    problem: Problem, output: LossOutput, norm: Tensor | None, hypergradient_norm: Tensor | None = None
) -> StepResult:
    """Return the result of a step.

    Args:
        problem: that has stepped.
        output: its loss.
        norm: of its gradient before clipping; None where it is not clipped.
        hypergradient_norm: of its total gradient; None where it passes through no solution.
    """
    metrics = {name: value.detach() for name, value in output.metrics.items()}
    if norm is not None:
        metrics["gradient_norm"] = norm.detach()
    if hypergradient_norm is not None:
        metrics["hypergradient_norm"] = hypergradient_norm
    loss = output.loss.detach()
    return StepResult(loss if problem.settings.tasks is None else loss / problem.settings.tasks, metrics)
