"""Algebra on vectors that are lists of tensors, one a parameter."""

import torch
from torch import Tensor

from mlotool.program.differentiation import Vector


def add(a: Vector, b: Vector, scale: float = 1.0) -> list[Tensor]:
    """Return `a + scale * b`."""
    return list(torch._foreach_add(list(a), list(b), alpha=scale))


def scaled(a: Vector, factor: float | Tensor) -> list[Tensor]:
    """Return `factor * a`; a tensor factor is 0-D."""
    return list(torch._foreach_mul(list(a), factor))


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product, 0-D."""
    return torch.stack([torch.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()


def norm(a: Vector) -> Tensor:
    """Return the 2-norm, 0-D."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(a))))


def aliases(a: Vector) -> list[Tensor]:
    """Return views with nodes of their own, at which partial derivatives can be taken."""
    return [tensor.view_as(tensor) for tensor in a]


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
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [v for _, v in pairs],
        retain_graph=retain or create_graph,
        create_graph=create_graph,
        allow_unused=True,
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
