"""Algebra on vectors that are lists of tensors, one a parameter.

Where parameters have a leading task axis, a vector holds one vector per task: inner products and norms then have one
value per task, and factors and conditions may have.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlotool.core.gradient import pulled_back
from mlotool.core.tracing import decided, is_joint, is_tracing
from mlotool.problem.interface import Vector


def add(a: Vector, b: Vector, scale: float | Tensor = 1.0) -> list[Tensor]:
    """Return `a + scale * b`; a tensor scale is 0-D, or one a task.

    Example:
        >>> import torch
        >>> add([torch.ones(2)], [torch.ones(2)], 3.0)
        [tensor([4., 4.])]
    """
    if isinstance(scale, Tensor) and (scale.dim() or is_tracing()):
        return [x + _on_axis(scale, y).to(y.dtype) * y for x, y in zip(a, b, strict=True)]
    return list(torch._foreach_add(list(a), list(b), alpha=float(scale)))


def scaled(a: Vector, factor: float | Tensor) -> list[Tensor]:
    """Return `factor * a`; a tensor factor is 0-D, or one a task.

    Example:
        >>> import torch
        >>> scaled([torch.ones(2, 1)], torch.tensor([3.0, 4.0]))[0].tolist()
        [[3.0], [4.0]]
    """
    if isinstance(factor, Tensor) and (factor.dim() or is_tracing()):
        return [_on_axis(factor, x).to(x.dtype) * x for x in a]
    if isinstance(factor, Tensor) and not factor.is_cuda:
        # A 0-D tensor of a wider type would promote 0-D parameters.
        factor = float(factor)
    return list(torch._foreach_mul(list(a), factor))


def choose(condition: bool | Tensor, a: Vector, b: Vector) -> list[Tensor]:
    """Return `a` where the condition holds, one or one a task, and `b` elsewhere; NaN in the other does not pass.

    Example:
        >>> import torch
        >>> choose(torch.tensor([True, False]), [torch.ones(2, 1)], [torch.zeros(2, 1)])[0].tolist()
        [[1.0], [0.0]]
    """
    if not isinstance(condition, Tensor) or condition.dim() == 0:
        if not (isinstance(condition, Tensor) and is_joint()):
            return list(a if decided(condition) else b)
        return [torch.where(condition, x, y) for x, y in zip(a, b, strict=True)]
    return [torch.where(_on_axis(condition, x), x, y) for x, y in zip(a, b, strict=True)]


def copies(a: Vector) -> list[Tensor]:
    """Return detached copies.

    Example:
        >>> import torch
        >>> [each.requires_grad for each in copies([torch.ones(2, requires_grad=True)])]
        [False]
    """
    return [tensor.detach().clone() for tensor in a]


def moved_to(a: Vector, like: Vector) -> list[Tensor]:
    """Return the tensors on the devices and of the types of others: those of a checkpoint are on the CPU.

    Example:
        >>> import torch
        >>> moved_to([torch.ones(1)], [torch.zeros(1, dtype=torch.float64)])
        [tensor([1.], dtype=torch.float64)]
    """
    return [tensor.to(other) for tensor, other in zip(a, like, strict=True)]


def zeros(a: Vector) -> list[Tensor]:
    """Return zeros of the same shapes.

    Example:
        >>> import torch
        >>> zeros([torch.ones(2)])
        [tensor([0., 0.])]
    """
    return [torch.zeros_like(tensor) for tensor in a]


def dot(a: Vector, b: Vector, num_tasks: int | None = None) -> Tensor:
    """Return the inner product: 0-D, or one a task.

    Example:
        >>> import torch
        >>> a = [torch.ones(2, 3), torch.ones(2)]
        >>> dot(a, a), dot(a, a, num_tasks=2)
        (tensor(8.), tensor([4., 4.]))
    """
    if num_tasks is None:
        return torch.stack([torch.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()
    return torch.stack([(x * y).reshape(num_tasks, -1).sum(1) for x, y in zip(a, b, strict=True)]).sum(0)


def norm(a: Vector, num_tasks: int | None = None) -> Tensor:
    """Return the 2-norm: 0-D, or one a task.

    Example:
        >>> import torch
        >>> norm([torch.tensor([3.0]), torch.tensor([4.0])]), norm([torch.tensor([3.0, 4.0])], num_tasks=2)
        (tensor(5.), tensor([3., 4.]))
    """
    if num_tasks is None:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(a))))
    rows = [torch.linalg.vector_norm(x.reshape(num_tasks, -1), dim=1) for x in a]
    return torch.linalg.vector_norm(torch.stack(rows), dim=0)


def is_finite(a: Vector) -> bool:
    """Return whether all numbers are, so that the vector may be kept for another time.

    Cost: a transfer from the device.

    Example:
        >>> import torch
        >>> is_finite([torch.ones(2)]), is_finite([torch.ones(2), torch.tensor([1.0, torch.nan])])
        (True, False)
    """
    return bool(norm(a).isfinite())


def flatten(a: Vector, num_tasks: int | None = None) -> Tensor:
    """Return one row per task, a single one without tasks; of half precision in float32, as torch's solvers want it.

    Example:
        >>> import torch
        >>> flatten([torch.ones(2, 3), torch.ones(2)], num_tasks=2).shape
        torch.Size([2, 4])
    """
    rows = torch.cat([tensor.reshape(num_tasks or 1, -1) for tensor in a], 1)
    return rows.float() if rows.dtype.itemsize < 4 else rows


def unflatten(rows: Tensor, like: Vector, num_tasks: int | None = None) -> list[Tensor]:
    """Return the vector whose rows these are, in the shapes and types of `like`.

    Example:
        >>> import torch
        >>> [each.shape for each in unflatten(torch.ones(2, 4), [torch.ones(2, 3), torch.ones(2)], num_tasks=2)]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    parts = rows.split([tensor.numel() // (num_tasks or 1) for tensor in like], 1)
    return [part.reshape(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]


def aliases(a: Vector) -> list[Tensor]:
    """Return views with nodes of their own, at which partial derivatives can be taken.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [alias] = aliases([x])
        >>> alias is x, torch.equal(alias, x)
        (False, True)
    """
    return [tensor.view_as(tensor) for tensor in a]


def constants(a: Vector) -> list[Tensor]:
    """Return the tensors without a graph.

    Example:
        >>> import torch
        >>> [each.requires_grad for each in constants([torch.ones(2, requires_grad=True)])]
        [False]
    """
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in a]


def chosen(a: Iterable[Tensor], flags: Iterable[bool]) -> list[Tensor]:
    """Return the tensors whose flag is set.

    Example:
        >>> chosen([torch.zeros(1), torch.ones(1)], [False, True])
        [tensor([1.])]
    """
    return [tensor for tensor, flag in zip(a, flags, strict=True) if flag]


def leaves(a: Vector, wanted: Sequence[bool] | None = None) -> list[Tensor]:
    """Return detached tensors that require a gradient, all of them or the wanted ones.

    Each is new, even where a tensor is a leaf already: that may be a parameter, whose hooks belong to its owner.

    Example:
        >>> import torch
        >>> [each.requires_grad for each in leaves([torch.ones(2), torch.ones(3)], [True, False])]
        [True, False]
    """
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

    Example:
        >>> import torch
        >>> x, y = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> vector_jacobian([3 * x], [x, y], [torch.ones(2)])
        [tensor([3., 3.]), tensor([0.])]
    """
    pairs = [(y, v) for y, v in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs or not inputs:
        return [torch.zeros_like(x) for x in inputs]
    pulled = pulled_back(
        [y for y, _ in pairs], inputs, [v for _, v in pairs], retain=retain or create_graph, create_graph=create_graph
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, pulled, strict=True)]


def _on_axis(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).reshape(values.shape + (1,) * (like.dim() - values.dim()))
