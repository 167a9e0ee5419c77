"""Second-order products by double backward: exact."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlotool.core.forward_mode import explained, twice_differentiable
from mlotool.hypergradient.products.base import AbstractProduct
from mlotool.hypergradient.vector import leaves, scaled, vector_jacobian
from mlotool.problem.interface import LowerView, Vector


class ReverseProduct(AbstractProduct):
    """Double backward: one graph of the gradient, through which every product runs back.

    In fp16 the loss is scaled by a constant, and vectors to norm 1, so that neither backward pass underflows.

    Cost: about 2 gradients a product; memory of one gradient's graph.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> product = ReverseProduct(view, theta, inputs, wanted=[True])
        >>> product.hessian([torch.ones(1)]), product.cross([torch.ones(1)])
        ([tensor([2.])], [tensor([-2.])])
    """

    def __init__(self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> None:
        super().__init__(view)
        self._theta = leaves(theta)
        points = leaves(inputs, tuple(wanted))
        self._wanted = [point for point, flag in zip(points, wanted, strict=True) if flag]
        problem, devices = view.problem, view.devices
        self._problem = problem.name
        with torch.enable_grad(), explained(problem.name, "reverse"):
            loss = twice_differentiable(
                problem.name, problem.traits, devices, lambda: view.own_loss(self._theta, points)
            )
            factor = torch.full_like(loss, self._scale or 1.0)
            self._gradient = vector_jacobian([loss], self._theta, [factor], create_graph=True)

    @property
    def gradient(self) -> list[Tensor]:
        """The gradient at the point, one tensor a parameter."""
        found = [each.detach() for each in self._gradient]
        return found if self._scale is None else scaled(found, 1.0 / self._scale)

    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        return self._product(self._theta, vector, retain=True)

    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`: `M^T p` is linear in p, and its derivative transposed is M."""
        probe = [torch.zeros_like(tensor, requires_grad=True) for tensor in self._gradient]
        with torch.enable_grad(), explained(self._problem, "reverse"):
            pulled = vector_jacobian(self._gradient, self._wanted, probe, create_graph=True)
            found = vector_jacobian(pulled, probe, directions)
        return found if self._scale is None else scaled(found, 1.0 / self._scale)

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`; frees the graph."""
        found = self._product(self._wanted, vector, retain=False)
        return found if factor == 1.0 else scaled(found, factor)

    def pull(self, vector: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """Return both products in one pass, which frees the graph."""
        found = self._product([*self._theta, *self._wanted], vector, retain=False)
        return found[: len(self._theta)], found[len(self._theta) :]

    def _product(self, points: list[Tensor], vector: Vector, *, retain: bool) -> list[Tensor]:
        with explained(self._problem, "reverse"):
            return self._normalised(vector, lambda u: vector_jacobian(self._gradient, points, u, retain=retain))
