"""Second-order products of a lower loss: `H u` and `M^T q`, without a graph in their results.

H is the derivative of the stationarity `F = dC_l/dtheta` with respect to theta, M the one with respect to the
inputs of theta*_l.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.replay import Habit, Replay
from mlotool.hypergradient.vector import add, leaves, norm, scaled, vector_jacobian
from mlotool.program.differentiation import LowerLoss, Vector

Gradient = Callable[[Vector], list[Tensor]]
"""`theta -> gradient`."""

DEFAULT_RADIUS = {torch.float64: 1e-5, torch.float32: 1e-2}
"""Norm of the perturbation: where truncation and rounding balance (float32: measured, 1e-2 to 1e-1)."""


FP16_LOSS_SCALE = 2.0**10
"""Measured: an error of 0.06% with vectors of norm 1; without either, small vectors lose 98%."""


class AbstractProduct(ABC):
    """Products at one point, on one batch, with one set of random numbers.

    Args:
        lower_loss: the loss.
        theta: the point, one tensor a parameter.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
    """

    @abstractmethod
    def hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`, one tensor a parameter."""

    @abstractmethod
    def cross(self, vector: Vector) -> list[Tensor]:
        """Return `M^T q`, one tensor a wanted input; the last call."""


class ReverseProduct(AbstractProduct):
    """Double backward: one graph of the gradient, through which every product runs back.

    In fp16 the loss is scaled by a constant, and vectors to norm 1, so that neither backward pass underflows.

    Cost: about 2 gradients a product; memory of one gradient's graph.
    """

    def __init__(self, lower_loss: LowerLoss, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> None:
        self._theta = leaves(theta)
        points = leaves(inputs, tuple(wanted))
        self._wanted = [point for point, flag in zip(points, wanted, strict=True) if flag]
        with torch.enable_grad():
            loss = lower_loss(self._theta, points)
            self._scale = FP16_LOSS_SCALE if lower_loss.precision == "fp16" else None
            factor = torch.full_like(loss, self._scale or 1.0)
            self._gradient = vector_jacobian([loss], self._theta, [factor], create_graph=True)

    def hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        return self._product(self._theta, vector, retain=True)

    def cross(self, vector: Vector) -> list[Tensor]:
        """Return `M^T q`; frees the graph."""
        return self._product(self._wanted, vector, retain=False)

    def _product(self, points: list[Tensor], vector: Vector, *, retain: bool) -> list[Tensor]:
        if self._scale is None:
            return vector_jacobian(self._gradient, points, vector, retain=retain)
        length = norm(vector).clamp_min(torch.finfo(torch.float32).tiny)
        found = vector_jacobian(self._gradient, points, scaled(vector, 1.0 / length), retain=retain)
        return scaled(found, length / self._scale)


class FiniteDifferenceProduct(AbstractProduct):
    """Central differences of first-order gradients: `H u = (F(theta + e u) - F(theta - e u)) / 2e`.

    The parameters are never touched: perturbed copies take their places. Both evaluations see the same random
    numbers, and the same values behind `stop_gradient`. The cross product differentiates with respect to the
    inputs alone, so of a loss that is weighted per sample only the forward pass and the weights' own path are left.

    Args:
        radius: 2-norm of the perturbation `e u`, of each task's in `H u`; None takes `DEFAULT_RADIUS` of the
            parameters' dtype.
        habit: of the loss, kept between pullbacks.

    Cost: 2 gradients a product (and a forward pass, once, where the loss uses `stop_gradient`); no graph is kept.
    """

    def __init__(
        self,
        lower_loss: LowerLoss,
        theta: Vector,
        inputs: Vector,
        wanted: Sequence[bool],
        radius: float | None = None,
        habit: Habit | None = None,
    ) -> None:
        self._loss = lower_loss
        self._theta = point = [tensor.detach() for tensor in theta]
        self._inputs = values = [tensor.detach() for tensor in inputs]
        self._wanted = wanted
        self._radius = radius or DEFAULT_RADIUS.get(theta[0].dtype, DEFAULT_RADIUS[torch.float32])
        self._replay = Replay(lambda: [lower_loss(point, values)], lower_loss.devices, habit)

    def hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""

        def gradient(theta: Vector) -> list[Tensor]:
            with torch.enable_grad():
                point = leaves(theta)
                loss = self._loss(point, self._inputs)
                return vector_jacobian([loss], point, [torch.ones_like(loss)], retain=False)

        # Tasks share nothing here, so each has a step of its own; in the cross product they share the inputs.
        return self._difference(gradient, vector, self._loss.num_tasks)

    def cross(self, vector: Vector) -> list[Tensor]:
        """Return `M^T q`."""

        def gradient(theta: Vector) -> list[Tensor]:
            with torch.enable_grad():
                points = leaves(self._inputs, tuple(self._wanted))
                loss = self._loss(theta, points)
                wanted = [point for point, flag in zip(points, self._wanted, strict=True) if flag]
                return vector_jacobian([loss], wanted, [torch.ones_like(loss)], retain=False)

        return self._difference(gradient, vector, None)

    def _difference(self, gradient: Gradient, vector: Vector, num_tasks: int | None) -> list[Tensor]:
        length = norm(vector, num_tasks)
        # A zero vector has a zero product: keep 0 * (radius / 0) away.
        scale = self._radius / length.clamp_min(torch.finfo(length.dtype).tiny)
        above = self._replay(lambda: gradient(self._moved(vector, scale)))
        below = self._replay(lambda: gradient(self._moved(vector, -scale)))
        return scaled(add(above, below, -1.0), length / (2.0 * self._radius))

    def _moved(self, vector: Vector, scale: Tensor) -> list[Tensor]:
        # One buffer: the step becomes the point.
        point = scaled(vector, scale)
        torch._foreach_add_(point, self._theta)
        return point
