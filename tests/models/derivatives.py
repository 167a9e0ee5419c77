"""Hessian-vector products by three ways, for tests that a model has second derivatives in every mode."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

Loss = Callable[[nn.Module], Tensor]
"""A scalar, of a module that it calls with whatever parameters are in it."""


class _Scalar(nn.Module):
    """A module whose forward is a loss, so that `functional_call` takes its parameters."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self) -> Tensor:
        return self._loss(self.module)


def direction(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        f"module.{name}": torch.randn(each.shape, generator=generator, dtype=each.dtype)
        for name, each in module.named_parameters()
    }


def reverse_over_reverse(module: nn.Module, loss: Loss, vector: dict[str, Tensor]) -> dict[str, Tensor]:
    theta = {f"module.{name}": each for name, each in module.named_parameters()}
    slopes = torch.autograd.grad(loss(module), list(theta.values()), create_graph=True)
    product = torch.autograd.grad(
        slopes, list(theta.values()), [vector[name] for name in theta], materialize_grads=True
    )
    return dict(zip(theta, product, strict=True))


def forward_over_reverse(module: nn.Module, loss: Loss, vector: dict[str, Tensor]) -> dict[str, Tensor]:
    """By dual numbers through a pullback that builds no graph."""
    scalar = _Scalar(module, loss)
    with forward_ad.dual_level():
        theta = {
            name: forward_ad.make_dual(each.detach(), vector[name].to(each)) for name, each in scalar.named_parameters()
        }
        value, pullback = torch.func.vjp(lambda at: functional_call(scalar, at), theta)
        (slopes,) = pullback(torch.ones_like(value), retain_graph=False, create_graph=False)
        tangents = {name: forward_ad.unpack_dual(each).tangent for name, each in slopes.items()}
    return {name: torch.zeros_like(slopes[name]) if each is None else each for name, each in tangents.items()}


def finite_differences(module: nn.Module, loss: Loss, vector: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    scalar = _Scalar(module, loss)
    theta = {name: each.detach() for name, each in scalar.named_parameters()}

    def slopes(sign: float) -> dict[str, Tensor]:
        at = {name: (each + sign * step * vector[name]).requires_grad_() for name, each in theta.items()}
        found = torch.autograd.grad(functional_call(scalar, at), list(at.values()))
        return dict(zip(at, found, strict=True))

    above, below = slopes(1), slopes(-1)
    return {name: (above[name] - below[name]) / (2 * step) for name in theta}


def assert_second_derivatives(module: nn.Module, loss: Loss) -> None:
    """The three ways agree, and not on zero."""
    vector = direction(module)
    reverse = reverse_over_reverse(module, loss, vector)
    torch.testing.assert_close(forward_over_reverse(module, loss, vector), reverse, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(finite_differences(module, loss, vector, 1e-6), reverse, rtol=1e-5, atol=1e-7)
    assert all(bool(each.any()) for each in reverse.values())
