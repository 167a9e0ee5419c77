"""A gate that is closed: a result without weight, of which the weight has a gradient all the same."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def gated(weight: Tensor, result: Tensor) -> Tensor:
    """Return `weight * result`; a backward pass leaves out the gradient of the result, which is zero.

    So the parameters of a candidate that is not taken have no gradient, and an optimizer leaves them. Where the
    gradient is itself differentiated it is there: its derivative for the weight is not zero, and second derivatives,
    tangents and finite differences are those of the mixture.

    Args:
        weight: 0-D; 0 where the gate is closed.
        result: any shape.

    Source: Cai et al. 2019, ProxylessNAS (arXiv 1812.00332), section 3.2.

    Example:
        >>> weight, result = torch.zeros((), requires_grad=True), torch.ones(2, requires_grad=True)
        >>> gated(weight, result).sum().backward()
        >>> weight.grad, result.grad
        (tensor(2.), None)
    """
    found: Tensor = _Gate.apply(weight, result)
    return found


class _Gate(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, result: Tensor) -> Tensor:
        return weight * result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, result = ctx.saved_tensors
        return (cotangent * result).sum(), weight * cotangent if torch.is_grad_enabled() else None

    @staticmethod
    def jvp(ctx: Any, weight_tangent: Tensor | None, result_tangent: Tensor | None) -> Tensor:
        weight, result = ctx.saved_tensors
        terms = [
            weight_tangent * result if weight_tangent is not None else None,
            weight * result_tangent if result_tangent is not None else None,
        ]
        return sum(each for each in terms if each is not None)
