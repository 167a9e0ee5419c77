"""Algebra on vectors that are lists of tensors, one a parameter.

Where parameters have a leading task axis, a vector holds one vector a task: inner products and norms then have one
value a task, and factors and conditions may have.
"""

import torch
from torch import Tensor

from mlotool.core.gradient import gradient_of, pulled_back
from mlotool.core.tracing import decided, is_tracing
from mlotool.problem.interface import Vector


def add(a: Vector, b: Vector, scale: float | Tensor = 1.0) -> list[Tensor]:
    """Return `a + scale * b`; a tensor scale is 0-D, or one a task."""
    if isinstance(scale, Tensor) and (scale.dim() or is_tracing()):
        return [x + _on_axis(scale, y).to(y.dtype) * y for x, y in zip(a, b, strict=True)]
    return list(torch._foreach_add(list(a), list(b), alpha=float(scale)))


def scaled(a: Vector, factor: float | Tensor) -> list[Tensor]:
    """Return `factor * a`; a tensor factor is 0-D, or one a task."""
    if isinstance(factor, Tensor) and (factor.dim() or is_tracing()):
        return [_on_axis(factor, x).to(x.dtype) * x for x in a]
    if isinstance(factor, Tensor) and not factor.is_cuda:
        # A 0-D tensor of a wider type would promote 0-D parameters.
        factor = float(factor)
    return list(torch._foreach_mul(list(a), factor))


def choose(condition: bool | Tensor, a: Vector, b: Vector) -> list[Tensor]:
    """Return `a` where the condition holds, one or one a task, and `b` elsewhere; NaN in the other does not pass."""
    if not isinstance(condition, Tensor) or condition.dim() == 0:
        return list(a if decided(condition) else b)
    return [torch.where(_on_axis(condition, x), x, y) for x, y in zip(a, b, strict=True)]


def copies(a: Vector) -> list[Tensor]:
    """Return detached copies."""
    return [tensor.detach().clone() for tensor in a]


def zeros(a: Vector) -> list[Tensor]:
    """Return zeros of the same shapes."""
    return [torch.zeros_like(tensor) for tensor in a]


def dot(a: Vector, b: Vector, num_tasks: int | None = None) -> Tensor:
    """Return the inner product: 0-D, or one a task."""
    if num_tasks is None:
        return torch.stack([torch.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()
    return torch.stack([(x * y).reshape(num_tasks, -1).sum(1) for x, y in zip(a, b, strict=True)]).sum(0)


def norm(a: Vector, num_tasks: int | None = None) -> Tensor:
    """Return the 2-norm: 0-D, or one a task."""
    if num_tasks is None:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(a))))
    rows = [torch.linalg.vector_norm(x.reshape(num_tasks, -1), dim=1) for x in a]
    return torch.linalg.vector_norm(torch.stack(rows), dim=0)


def apart(a: Vector, b: Vector) -> float:
    """Return the norm of the difference over that of the longer one; 0 where both are zero."""
    scale = max(float(norm(a)), float(norm(b)))
    return float(norm(add(a, b, -1.0))) / scale if scale > 0 else 0.0


def flatten(a: Vector, num_tasks: int | None = None) -> Tensor:
    """Return one row a task, a single one without tasks."""
    return torch.cat([tensor.reshape(num_tasks or 1, -1) for tensor in a], 1)


def unflatten(rows: Tensor, like: Vector, num_tasks: int | None = None) -> list[Tensor]:
    """Return the vector whose rows these are, in the shapes of `like`."""
    parts = rows.split([tensor.numel() // (num_tasks or 1) for tensor in like], 1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def aliases(a: Vector) -> list[Tensor]:
    """Return views with nodes of their own, at which partial derivatives can be taken."""
    return [tensor.view_as(tensor) for tensor in a]


def constants(a: Vector) -> list[Tensor]:
    """Return the tensors without a graph."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in a]


def leaves(a: Vector, wanted: "list[bool] | tuple[bool, ...] | None" = None) -> list[Tensor]:
    """Return detached tensors that require a gradient, all of them or the wanted ones."""
    flags = [True] * len(a) if wanted is None else wanted
    return [tensor.detach().requires_grad_(flag) for tensor, flag in zip(a, flags, strict=True)]


def vector_jacobian(
    outputs: Vector, inputs: Vector, cotangents: Vector, *, retain: bool = True, create_graph: bool = False
) -> list[Tensor]:
    """Return `(d outputs/d inputs)^T cotangents`, zeros where nothing depends on an input.

    Args:
        outputs: tensors, of which those without a graph are constants.
        inputs: tensors that require a gradient.
        cotangents: one for each output.
        retain: keep the graph for another call.
        create_graph: make the result differentiable.
    """
    pairs = [(y, v) for y, v in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs or not inputs:
        return [torch.zeros_like(x) for x in inputs]
    found = pulled_back(
        [y for y, _ in pairs],
        inputs,
        [v for _, v in pairs],
        retain=retain or create_graph,
        create_graph=create_graph,
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def slopes(loss: Tensor, sources: Vector) -> list[Tensor]:
    """Return the gradient of a loss, zeros where it does not depend on a source; the graph is freed."""
    if not loss.requires_grad or not sources:
        return zeros(sources)
    found = gradient_of(loss, sources)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True)]


def _on_axis(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).reshape(values.shape + (1,) * (like.dim() - values.dim()))
