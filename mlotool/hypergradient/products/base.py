"""What a product is: `H u`, `M d` and `M^T q` of a lower loss, without a graph in their results.

H is the derivative of the stationarity `F = dC_l/dtheta` with respect to theta, M the one with respect to the
inputs of theta*_l. On several ranks, each of which has its own part of the batch, both are means over ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.forward_mode import explained, twice_differentiable
from mlotool.core.replay import RandomState
from mlotool.hypergradient.vector import chosen, leaves, norm, scaled, vector_jacobian
from mlotool.problem.interface import LowerView, Vector

# Measured: an error of 0.06% with vectors of norm 1; without either, small vectors lose 98%.
FP16_LOSS_SCALE = 2.0**10


class PairedLoss:
    """The loss of a view, of which all evaluations draw the same random numbers.

    Args:
        view: of the problem.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = PairedLoss(LowerView(LowerProblem("w"), (), lambda theta, inputs: torch.rand(())))
        >>> bool(loss([], []) == loss([], []))
        True
    """

    def __init__(self, view: LowerView) -> None:
        self._view = view
        self._random: RandomState | None = None

    @property
    def is_used(self) -> bool:
        """Whether it was evaluated."""
        return self._random is not None

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        """Return the loss on this rank's part of the batch."""
        if self._random is None:
            self._random = RandomState(self._view.devices)
        else:
            self._random.restore()
        return self._view.own_loss(theta, inputs)


def stationarity(view: LowerView, theta: Vector, inputs: Vector, scale: float = 1.0) -> list[Tensor]:
    """Return `F = dC_l/dtheta` on this rank's part of the batch, with its graph, one tensor per parameter.

    Args:
        view: of the problem.
        theta: the point.
        inputs: what shapes it.
        scale: the loss is taken that many times.
    """
    problem, devices = view.problem, view.devices
    loss = twice_differentiable(problem.name, problem.traits, devices, lambda: view.own_loss(theta, inputs))
    return vector_jacobian([loss], theta, [torch.full_like(loss, scale)], create_graph=True)


class AbstractProduct(ABC):
    """Products at one point, on one batch, with one set of random numbers.

    Args:
        view: the loss.
        theta: the point, one tensor per parameter.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.

    Example:
        >>> from mlotool.hypergradient.products.base import ReverseProduct
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> product = ReverseProduct(view, theta, inputs, wanted=[True])
        >>> product.hessian([torch.ones(1)]), product.cross([torch.ones(1)])
        ([tensor([2.])], [tensor([-2.])])
    """

    def __init__(self, view: LowerView) -> None:
        self._mean = view.problem.rank_mean.mean
        self._scale = FP16_LOSS_SCALE if view.problem.precision == "fp16" else None

    def _normalised(self, vector: Vector, product: Callable[[Vector], list[Tensor]]) -> list[Tensor]:
        """Return a product with a loss that is scaled in fp16, where the vector is to have norm 1."""
        if self._scale is None:
            return product(vector)
        length = norm(vector).clamp_min(torch.finfo(torch.float32).tiny)
        return scaled(product(scaled(vector, 1.0 / length)), length / self._scale)

    def hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`, one tensor per parameter."""
        return self._mean(self.own_hessian(vector))

    def push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`, one tensor per parameter, for one direction per wanted input."""
        return self._mean(self.own_push(directions))

    @abstractmethod
    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u` of this rank's part of the batch, whatever other ranks do."""

    @abstractmethod
    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d` of this rank's part of the batch."""

    @abstractmethod
    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q` of this rank's part of the batch, one tensor per wanted input; the last call.

        A pullback hands it on as it is: the gradient that it becomes a part of is averaged as a whole.
        """


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
        points = leaves(inputs, wanted)
        self._wanted = chosen(points, wanted)
        self._problem = view.problem.name
        with torch.enable_grad(), explained(self._problem, "reverse"):
            self._gradient = stationarity(view, self._theta, points, self._scale or 1.0)

    @property
    def gradient(self) -> list[Tensor]:
        """The gradient at the point, one tensor per parameter."""
        return scaled([slope.detach() for slope in self._gradient], 1.0 / (self._scale or 1.0))

    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        return self._product(self._theta, vector, retain=True)

    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`: `M^T p` is linear in p, and its derivative transposed is M."""
        probe = [torch.zeros_like(tensor, requires_grad=True) for tensor in self._gradient]
        with torch.enable_grad(), explained(self._problem, "reverse"):
            pulled = vector_jacobian(self._gradient, self._wanted, probe, create_graph=True)
            pushed = vector_jacobian(pulled, probe, directions)
        return pushed if self._scale is None else scaled(pushed, 1.0 / self._scale)

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`; frees the graph."""
        product = self._product(self._wanted, vector, retain=False)
        return product if factor == 1.0 else scaled(product, factor)

    def pull(self, vector: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """Return `H u` and `M^T u` of this rank's part of the batch in one pass, which frees the graph."""
        products = self._product([*self._theta, *self._wanted], vector, retain=False)
        return products[: len(self._theta)], products[len(self._theta) :]

    def _product(self, points: list[Tensor], vector: Vector, *, retain: bool) -> list[Tensor]:
        with explained(self._problem, "reverse"):
            return self._normalised(vector, lambda u: vector_jacobian(self._gradient, points, u, retain=retain))
