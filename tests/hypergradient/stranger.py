"""A hypergradient written by the interface's own page alone: of several ranks it knows nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.problem.interface import AbstractHypergradient, LowerView, Vector


@dataclass(frozen=True)
class Stranger(AbstractHypergradient):
    """Damped Richardson steps on `(H + C_l) q = v`, and `-M^T q` shrunk where it is long.

    Neither is linear in the loss: what is a mean over ranks too late, or never, shows.

    Args:
        is_careless: reads this rank's own loss in the place of the mean.
    """

    is_careless: bool = False

    def pullback(self, view: LowerView, inputs: Vector) -> "_Pullback":
        """Return the pullback."""
        return _Pullback(self, view, view.theta)


@dataclass
class _Pullback:
    settings: Stranger
    view: LowerView
    outputs: tuple[Tensor, ...]

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return what is found, without a graph."""
        point = [tensor.detach().requires_grad_() for tensor in theta]
        values = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(inputs, wanted, strict=True)]
        return [each.detach() for each in self.differentiable(point, values, wanted, cotangent)]

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return what is found as a function of theta, the inputs and the cotangent."""
        view, loss = self.view, self.view.own_loss if self.settings.is_careless else self.view
        with torch.enable_grad():
            point, values = [x.view_as(x) for x in theta], [x.view_as(x) for x in inputs]
            sources = [value for value, flag in zip(values, wanted, strict=True) if flag]
            value = loss(point, values)
            if self.settings.is_careless:
                gradient = torch.autograd.grad(value, point, create_graph=True)
            else:
                gradient = tuple(view.gradient(point, values, create_graph=True))
            solution = list(cotangent)
            for _ in range(2):
                curved = _pulled(gradient, point, solution)
                rest = [v - h - value * q for v, h, q in zip(cotangent, curved, solution, strict=True)]
                solution = [q + 0.05 * r for q, r in zip(solution, rest, strict=True)]
            found = _pulled(gradient, sources, solution)
            size = torch.stack([(each**2).sum() for each in found]).sum()
            return [-each / (1.0 + size).sqrt() for each in found]


def _pulled(outputs: Sequence[Tensor], points: Vector, cotangent: Vector) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        outputs, list(points), list(cotangent), create_graph=True, allow_unused=True, materialize_grads=True
    )
