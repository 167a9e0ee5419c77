"""Second-order products of one operator: by finite differences, reverse over reverse and forward over reverse."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mlotool.core.tangents import apart, dual_level
from tests.core.operators.building import Operator

Loss = Callable[..., Tensor]
Mode = Callable[[], AbstractContextManager[None]]


def loss_of(operator: Operator) -> Loss:
    """Return a loss whose Hessian has an entry wherever the operator has a slope."""

    def loss(*tensors: Tensor) -> Tensor:
        # A product with a number, which has no tangent, takes torch forty times as long as one of two tangents.
        y = operator(*[torch.add(each, each * each, alpha=0.1) for each in tensors])
        y = torch.view_as_real(y) if y.is_complex() else y
        weight = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)
        return (weight * torch.add(y, y * y, alpha=0.3)).sum()

    return loss


def direction(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return normal numbers, one tensor for each."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype) for each in tensors]


def gradient(loss: Loss, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient; zeros where the loss does not depend on a tensor."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    found = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    return _filled(tensors, found)


def difference(loss: Loss, tensors: Sequence[Tensor], vector: Sequence[Tensor], size: float = 1e-5) -> list[Tensor]:
    """Return `H u` by a difference of the fourth order."""

    def at(factor: float) -> list[Tensor]:
        return gradient(loss, [x + factor * size * u for x, u in zip(tensors, vector, strict=True)])

    parts = zip(at(1), at(-1), at(2), at(-2), strict=True)
    return [(8 * (ahead - behind) - (far - near)) / (12 * size) for ahead, behind, far, near in parts]


def reverse(loss: Loss, tensors: Sequence[Tensor], vector: Sequence[Tensor], mode: Mode = nullcontext) -> list[Tensor]:
    """Return `H u` by double backward."""
    with mode():
        leaves = [each.detach().requires_grad_() for each in tensors]
        slopes = torch.autograd.grad(loss(*leaves), leaves, create_graph=True, allow_unused=True)
        pairs = [(g, u) for g, u in zip(slopes, vector, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return [torch.zeros_like(each) for each in tensors]
        found = torch.autograd.grad([g for g, _ in pairs], leaves, [u for _, u in pairs], allow_unused=True)
        return _filled(tensors, found)


def forward(loss: Loss, tensors: Sequence[Tensor], vector: Sequence[Any], mode: Mode = nullcontext) -> list[Tensor]:
    """Return `H u` as tangents of the gradient; a tensor of which u is None has no tangent."""
    with mode(), dual_level():
        pairs = zip(tensors, vector, strict=True)
        points = [x if u is None else forward_ad.make_dual(x.detach(), u) for x, u in pairs]
        value, pullback = torch.func.vjp(loss, *points)
        one = torch.ones_like(forward_ad.unpack_dual(value).primal)
        return _filled(tensors, apart(list(pullback(one, retain_graph=False, create_graph=False)))[1])


def forward_by_autograd(loss: Loss, tensors: Sequence[Tensor], vector: Any, mode: Mode = nullcontext) -> list[Tensor]:
    """Return the same by `torch.autograd.grad`, without a level of torch.func."""
    with mode(), dual_level():
        pairs = zip(tensors, vector, strict=True)
        points = [forward_ad.make_dual(x.detach().requires_grad_(), u) for x, u in pairs]
        found = torch.autograd.grad(loss(*points), points, allow_unused=True)
        return _filled(tensors, apart(_filled(tensors, found))[1])


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the 2-norm of the difference, over that of what is expected where that is not tiny."""
    size = sum(float(each.detach().double().square().sum()) for each in expected) ** 0.5
    parts = [(x.detach(), y.detach()) for x, y in zip(found, expected, strict=True)]
    error = sum(float((x.double() - y.double()).square().sum()) for x, y in parts) ** 0.5
    return error / size if size > 1e-6 else error


def _filled(tensors: Sequence[Tensor], found: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(x) if each is None else each for x, each in zip(tensors, found, strict=True)]
