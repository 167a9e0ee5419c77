"""Second-order products by central differences of first-order gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.replay import RandomState, Replay
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products.base import AbstractProduct
from mlotool.hypergradient.vector import add, constants, leaves, norm, scaled, slopes
from mlotool.problem.interface import LowerView, Vector

Loss = Callable[[Vector, Vector], Tensor]
"""`(theta, inputs) -> loss`."""

Gradient = Callable[[Vector, Loss], list[Tensor]]
"""`(theta, loss) -> gradient`."""


def default_radius(point: Vector, num_tasks: int | None = None) -> Tensor:
    """Return the 2-norm of a central difference's perturbation at `point`: 0-D, or one a task.

    `6 t max(rms(point), t)` with `t = eps^(1/3)`, where truncation, of the order of the radius squared, and rounding,
    of eps over it, balance: 3e-2 of the parameters' root mean square in float32, 4e-5 of it in float64. Not a share of
    their norm: along one direction a network of a million parameters bends as soon as one of a thousand. Measured
    against double backward on linear models, networks and a transformer of 1e6 parameters, at scales of 1e-6 to 1e6:
    errors of 3e-5 to 3e-4 in float32, below 1e-9 in float64.

    The floor, 1.5e-4 in float32 and 2e-10 in float64, is for parameters that begin at zero: those of which a change by
    1 matters then have errors of 5e-3 and 1e-5. Parameters whose own scale is below 1e-3 in float32 want a radius of
    their own; `mlotool.hypergradient.diagnostics.radius` finds out.
    """
    root = float(torch.finfo(point[0].dtype).eps) ** (1 / 3)
    count = sum(tensor.numel() for tensor in point) // (num_tasks or 1)
    return 6.0 * root * (norm(point, num_tasks) / count**0.5).clamp_min(root)


class FiniteDifferenceProduct(AbstractProduct):
    """Central differences of first-order gradients: `H u = (F(theta + e u) - F(theta - e u)) / 2e`.

    The parameters are never touched: perturbed copies take their places. Both evaluations see the same random
    numbers, and the same values behind `stop_gradient`. The cross product differentiates with respect to the
    inputs alone, so of a loss that is weighted per sample only the forward pass and the weights' own path are left.
    Solutions of lower problems inside the loss move along: by their derivative, `theta_l + e dtheta*_l/dtheta u`.

    Args:
        radius: 2-norm of the perturbation `e u`, of each task's in `H u`; None takes `default_radius` of the
            parameters.

    Cost: 2 gradients a product (and a forward pass, once, where the loss uses `stop_gradient`); no graph is kept.
        Where there are solutions inside, also a solve at each of them, and their pullbacks in each gradient.
    """

    def __init__(
        self,
        view: LowerView,
        theta: Vector,
        inputs: Vector,
        wanted: Sequence[bool],
        radius: float | None = None,
    ) -> None:
        self._loss = view
        self._theta = point = constants(theta)
        self._inputs = values = constants(inputs)
        self._wanted = wanted
        self._radius = radius
        self._replay = Replay(lambda: [view(point, values)], view.devices, view.problem.traits)
        self._random = RandomState(view.devices) if view.eliminated else None

    def hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""

        def gradient(theta: Vector, loss_at: Loss) -> list[Tensor]:
            with torch.enable_grad():
                point = leaves(theta)
                return slopes(loss_at(point, self._inputs), point)

        # Tasks share nothing here, so each has a step of its own; in the cross product they share the inputs.
        return self._difference(gradient, vector, self._loss.problem.num_tasks)

    def push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`; not within a loss that has solutions inside."""
        moving = iter(directions)
        whole = [
            next(moving) if flag else torch.zeros_like(tensor)
            for tensor, flag in zip(self._inputs, self._wanted, strict=True)
        ]

        def gradient(inputs: Vector) -> list[Tensor]:
            with torch.enable_grad():
                point = leaves(self._theta)
                return slopes(self._loss(point, inputs), point)

        moved = [tensor for tensor, flag in zip(self._inputs, self._wanted, strict=True) if flag]
        scale, inverse = self._step(whole, moved, None)
        above = self._replay(lambda: gradient(_moved(self._inputs, whole, scale)))
        below = self._replay(lambda: gradient(_moved(self._inputs, whole, -scale)))
        return scaled(add(above, below, -1.0), inverse)

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`."""

        def gradient(theta: Vector, loss_at: Loss) -> list[Tensor]:
            with torch.enable_grad():
                points = leaves(self._inputs, tuple(self._wanted))
                loss = loss_at(theta, points)
                return slopes(loss, [point for point, flag in zip(points, self._wanted, strict=True) if flag])

        return self._difference(gradient, vector, None, factor)

    def _difference(
        self, gradient: Gradient, vector: Vector, num_tasks: int | None, factor: float = 1.0
    ) -> list[Tensor]:
        scale, inverse = self._step(vector, self._theta, num_tasks)
        replay = self._replay
        ahead: Loss = self._loss
        behind: Loss = self._loss
        if self._loss.eliminated is not None:
            replay, (ahead, behind) = self._with_solutions(gradient, scaled(vector, scale))
        above = replay(lambda: gradient(_moved(self._theta, vector, scale), ahead))
        below = replay(lambda: gradient(_moved(self._theta, vector, -scale), behind))
        return scaled(add(above, below, -1.0), factor * inverse)

    def _with_solutions(self, gradient: Gradient, step: Vector) -> tuple[Replay, tuple[Loss, Loss]]:
        """Return how to evaluate, and the loss with the solutions inside it as they are after `step` and `-step`."""
        eliminated, random = self._loss.eliminated, self._random
        assert eliminated is not None and random is not None
        random.restore()
        moves = eliminated.push(self._theta, self._inputs, step)
        back = {name: [-move for move in each] for name, each in moves.items()}
        random.restore()
        # The pullbacks inside evaluate losses as well, more or fewer of them in either product.
        replay = Replay(lambda: gradient(self._theta, self._loss), self._loss.devices)
        return replay, (
            lambda theta, inputs: eliminated.function(theta, inputs, moves),
            lambda theta, inputs: eliminated.function(theta, inputs, back),
        )

    def _step(self, vector: Vector, point: Vector, num_tasks: int | None) -> tuple[float | Tensor, float | Tensor]:
        """Return the factor that makes `vector` as long as the radius, and what undoes it in a difference."""
        length = norm(vector, num_tasks)
        radius = default_radius(point, num_tasks) if self._radius is None else self._radius
        tiny = torch.finfo(length.dtype).tiny
        # A zero vector has a zero product: keep 0 * (radius / 0) away.
        if length.dim() or length.is_cuda or is_tracing():
            return radius / length.clamp_min(tiny), length / (2.0 * radius)
        # A number of the CPU needs no tensors.
        size, reach = float(length), float(radius)
        return reach / max(size, tiny), size / (2.0 * reach)


def _moved(point: Vector, vector: Vector, scale: float | Tensor) -> list[Tensor]:
    if isinstance(scale, float):
        return list(torch._foreach_add(list(point), list(vector), alpha=scale))
    # One buffer: the step becomes the point.
    moved = scaled(vector, scale)
    torch._foreach_add_(moved, list(point))
    return moved
