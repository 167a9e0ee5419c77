"""Tangents of a gradient: forward mode over reverse mode, without a graph of the gradient.

    d/de grad C(x + e d)  at e = 0

Double backward keeps the graph of the gradient, and then the graph of its derivative. Here each number of one gradient
carries its tangent along, and what is kept is what one backward pass needs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.forward_mode import forward_mode
from mlotool.core.gradient import dense
from mlotool.core.tangents import apart, dual_level, joined
from mlotool.problem.interface import Vector

Tangents = Sequence[Tensor | None]
"""How tensors move, one for each; None where one stays."""


def moving_gradient(
    loss: Callable[[Vector], Tensor],
    points: Vector,
    tangents: Tangents,
    wanted: Sequence[bool],
    *,
    problem: str = "",
    seed: float = 1.0,
    is_nested: bool = False,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradient of a loss with respect to some of its arguments, and how it moves.

    Args:
        loss: of tensors, 0-D.
        points: its arguments.
        tangents: how they move.
        wanted: with respect to which of them.
        problem: whose loss it is, for messages.
        seed: the loss is taken that many times.
        is_nested: whether autograd is called inside the loss, as by solutions of other problems: then by
            `torch.autograd`, whose graph has the tangents too, else by `torch.func`.

    Raises:
        ConfigError: the loss has an operator without a derivative in forward mode.

    Returns:
        A tensor for each wanted argument, twice; None where the loss does not depend on it, or its gradient stays.

    Example:
        >>> cube = lambda tensors: (tensors[0] ** 3 * tensors[1]).sum()  # its second derivative is 6 x y = 36
        >>> moving_gradient(cube, [torch.tensor([2.0]), torch.tensor([3.0])], [torch.ones(1), None], [True, False])
        ([tensor([36.])], [tensor([36.])])
    """
    with dual_level(), forward_mode(problem):
        still = [_unshared(each.detach()) for each in points]
        take = _by_autograd if is_nested else _by_transform
        return apart(take(loss, still, tangents, wanted, seed))


def _unshared(point: Tensor) -> Tensor:
    """Return a tensor whose entries have places of their own, as its tangent's: tasks may share one start."""
    is_shared = any(step == 0 and size > 1 for step, size in zip(point.stride(), point.shape, strict=True))
    return point.contiguous() if is_shared else point


def _by_transform(
    loss: Callable[[Vector], Tensor], points: Vector, tangents: Tangents, wanted: Sequence[bool], seed: float
) -> Sequence[Tensor | None]:
    moving = joined(points, tangents)

    def function(*sources: Tensor) -> Tensor:
        given = iter(sources)
        return loss([next(given) if flag else point for point, flag in zip(moving, wanted, strict=True)])

    sources = [point for point, flag in zip(moving, wanted, strict=True) if flag]
    value, pull = torch.func.vjp(function, *sources)[:2]
    found: Sequence[Tensor] = pull(torch.full_like(value, seed), retain_graph=False, create_graph=False)
    return found


def _by_autograd(
    loss: Callable[[Vector], Tensor], points: Vector, tangents: Tangents, wanted: Sequence[bool], seed: float
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        leaves = [point.requires_grad_(flag) for point, flag in zip(points, wanted, strict=True)]
        value = loss(joined(leaves, tangents))
        sources = [leaf for leaf, flag in zip(leaves, wanted, strict=True) if flag]
        if not value.requires_grad or not sources:
            return [None] * len(sources)
        return dense(torch.autograd.grad([value], sources, [torch.full_like(value, seed)], allow_unused=True))
