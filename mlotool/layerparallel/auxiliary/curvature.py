"""How steep a stage's loss is in its auxiliary variables, which bounds the rate at which they may move."""

from collections.abc import Callable

import torch
from torch import Tensor

EVERY = 20
"""Steps between two looks at the curvature."""

NUM_ITERATIONS = 3
"""Of the power method in a look; each is a pass of the stage, forward and backward."""

DECAY = 0.9
"""From one look to the next, of what has been seen: a steep batch keeps the rate small for a while."""

RADIUS = 1e-2
"""Of the finite differences, relative to the norm of a sample's variables."""

# s: samples of a batch, ...: the shape of a state


def largest_curvature(gradient: Callable[[Tensor], Tensor], point: Tensor, slope: Tensor) -> Tensor:
    """Return the largest curvature of a loss over the samples of a batch, as a tensor of one number.

    The loss is a sum over samples. Its Hessian is a block for each of them, and the largest absolute eigenvalue of each
    block is found by a few iterations of the power method, with Hessian-vector products by forward differences of the
    gradient. The method begins at the slope, along which the variables move, and where that is zero, as at the first
    visit, along the variables themselves.

    Args:
        gradient: `gradient(point)`, of the loss with respect to the variables, (s, ...).
        point: where the curvature is taken, (s, ...).
        slope: `gradient(point)`.

    Returns:
        A tensor (), 0 where the loss is linear.

    Example:
        >>> values = torch.tensor([[1.0, 4.0], [2.0, 3.0]])
        >>> point = torch.ones(2, 2)
        >>> round(largest_curvature(lambda x: values * x, point, values * point).item(), 1)
        4.0
    """
    direction, found = (
        _unit(torch.where(_norms(slope) > 0, slope, point)),
        torch.zeros(len(point), dtype=point.dtype, device=point.device),
    )
    radius = RADIUS * _norms(point).clamp(min=RADIUS)
    for _ in range(NUM_ITERATIONS):
        product = (gradient(point + radius * direction) - slope) / radius
        found = _norms(product).flatten()
        direction = _unit(product)
    return found.max()


def _norms(tensor: Tensor) -> Tensor:
    """Return each sample's norm, (s, 1, ...)."""
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _unit(tensor: Tensor) -> Tensor:
    norms = _norms(tensor)
    # A sample whose slope is zero stays where it is.
    return torch.where(norms > 0, tensor / norms.clamp(min=torch.finfo(tensor.dtype).tiny), torch.zeros_like(tensor))
