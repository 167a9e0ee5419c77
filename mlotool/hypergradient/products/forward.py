"""Second-order products by forward mode over reverse mode: `d/de grad C(x + e d)` at e = 0.

Each number of one gradient carries its tangent along, and what is kept is what one backward pass needs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.forward_mode import forward_mode
from mlotool.core.gradient import dense
from mlotool.core.tangents import apart, dual_level, joined
from mlotool.hypergradient.products.base import AbstractProduct, PairedLoss
from mlotool.hypergradient.vector import chosen, constants, scaled
from mlotool.problem.interface import LowerView, Vector

# How tensors move, one for each; None where one stays.
Tangents = Sequence[Tensor | None]


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
        remaining = iter(sources)
        return loss([next(remaining) if flag else point for point, flag in zip(moving, wanted, strict=True)])

    sources = chosen(moving, wanted)
    value, pull = torch.func.vjp(function, *sources)[:2]
    found: Sequence[Tensor] = pull(torch.full_like(value, seed), retain_graph=False, create_graph=False)
    return found


def _by_autograd(
    loss: Callable[[Vector], Tensor], points: Vector, tangents: Tangents, wanted: Sequence[bool], seed: float
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        leaves = [point.requires_grad_(flag) for point, flag in zip(points, wanted, strict=True)]
        value = loss(joined(leaves, tangents))
        sources = chosen(leaves, wanted)
        if not value.requires_grad or not sources:
            return [None] * len(sources)
        return dense(torch.autograd.grad([value], sources, [torch.full_like(value, seed)], allow_unused=True))


class ForwardProduct(AbstractProduct):
    """Tangents of a gradient: `H u = d/de F(theta + e u)`, where the loss is evaluated anew for each product.

    With blocks that are evaluated again (`remat` of a problem) the memory is that of the blocks' inputs with their
    tangents, and of one block. All evaluations see the same random numbers. Solutions of lower problems inside the loss
    move along, by their own derivative.

    In fp16 the loss is scaled by a constant, and vectors to norm 1, so that neither pass underflows.

    Cost: a gradient with tangents a product, about 3 gradients; `pull` gives `H u` and `M^T u` for one.

    Source: Pearlmutter 1994, Fast Exact Multiplication by the Hessian; Kemaev et al. 2025 (MixFlow-MG), section 3.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> ForwardProduct(view, theta, inputs, wanted=[True]).pull([torch.ones(1)])
        ([tensor([2.])], [tensor([-2.])])
    """

    def __init__(self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> None:
        super().__init__(view)
        self._problem = view.problem
        self._points = [*constants(theta), *constants(inputs)]
        self._count = len(theta)
        self._of_inputs = [*[False] * len(theta), *wanted]
        self._of_theta = [*[True] * len(theta), *[False] * len(inputs)]
        self._loss = PairedLoss(view)

    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        return self._along(vector, self._of_theta, self._of_theta)

    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`."""
        return self._along(directions, self._of_inputs, self._of_theta)

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`."""
        found = self._along(vector, self._of_theta, self._of_inputs)
        return found if factor == 1.0 else scaled(found, factor)

    def pull(self, vector: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """Return both products, from one evaluation."""
        both = [a or b for a, b in zip(self._of_theta, self._of_inputs, strict=True)]
        found = self._along(vector, self._of_theta, both)
        return found[: self._count], found[self._count :]

    def _along(self, direction: Vector, moving: Sequence[bool], wanted: Sequence[bool]) -> list[Tensor]:
        """Return how the gradient with respect to the wanted points moves along a direction of the moving ones."""
        count, sources = self._count, chosen(self._points, wanted)

        def tangents(vector: Vector) -> list[Tensor]:
            parts = iter(vector)
            found = moving_gradient(
                lambda points: self._loss(points[:count], points[count:]),
                self._points,
                [next(parts) if flag else None for flag in moving],
                wanted,
                problem=self._problem.name,
                seed=self._scale or 1.0,
                is_nested=self._problem.is_nested,
            )[1]
            return [torch.zeros_like(x) if each is None else each for x, each in zip(sources, found, strict=True)]

        return self._normalised(direction, tangents)
