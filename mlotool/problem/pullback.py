"""What an algorithm returns: the derivative of a solution, transposed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Vector = Sequence[Tensor]


class Pullback(Protocol):
    """The derivative of one solution at one moment, transposed."""

    outputs: tuple[Tensor, ...]
    """The values of theta*_l."""

    def first_order(
        self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: list[Tensor]
    ) -> list[Tensor]:
        """Return the cotangents of the wanted inputs, without a graph.

        Args:
            theta: the values of theta*_l.
            inputs: what it depends on.
            wanted: which of the inputs want a cotangent.
            cotangent: of theta*_l, one tensor a parameter; the same on all ranks. What is returned is added to a
                gradient that is averaged over them as a whole: it may be this rank's part, or the mean already. The
                list is the pullback's own: it may empty it, so that what it no longer needs is freed.
        """

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of theta, the inputs and the cotangent."""


@dataclass(frozen=True)
class Connected:
    """A solution that autograd itself connects to its inputs.

    Args:
        outputs: theta*_l, with its graph.
    """

    outputs: tuple[Tensor, ...]

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the cotangents of the wanted inputs, by autograd. Arguments as for `Pullback`."""
        points = [tensor for tensor, flag in zip(inputs, wanted, strict=True) if flag]
        found = torch.autograd.grad(self.outputs, points, list(cotangent), allow_unused=True)
        return [torch.zeros_like(x) if each is None else each for x, each in zip(points, found, strict=True)]
