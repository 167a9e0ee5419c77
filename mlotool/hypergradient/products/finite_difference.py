"""Second-order products by central differences of first-order gradients."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.gradient import gradient_of_difference, slopes_of
from mlotool.core.replay import RandomState, Replay
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import PRODUCT_ROUNDINGS, PRODUCTS
from mlotool.hypergradient.products.base import AbstractProduct
from mlotool.hypergradient.vector import add, chosen, constants, dot, leaves, norm, scaled, zeros
from mlotool.problem.interface import LowerView, Vector

# Of the problem and of what shapes it, up to which both sides of a difference share a backward pass. It saves the fixed
# cost of a pass, and keeps both graphs at once. Measured on networks of three layers, over two passes: cross products
# take 0.94 of the time with 1,500 parameters, 0.89 with 26,000, 0.94 with 85,000 and 1.05 with a million; products with
# H 0.86, 0.98, 1.06 and 1.18, since two graphs no longer fit the processor's caches.
MOST_PARAMETERS_AT_ONCE = 100_000

# Of a vector in a step: one number, or one a task.
Factor = float | Tensor

# `(theta, inputs) -> loss`.
Loss = Callable[[Vector, Vector], Tensor]


# `(loss, factor) -> its value at the point plus that many times the vector, and the tensors whose gradient is wanted`.
_Side = Callable[[Loss, Factor], list[Tensor]]


def default_radius(point: Vector, num_tasks: int | None = None) -> Tensor:
    """Return the 2-norm of a central difference's perturbation at `point`: 0-D, or one a task.

    `6 t max(rms(point), t)` with `t = eps^(1/3)`, where truncation, of the order of the radius squared, and rounding,
    of eps over it, balance: 3e-2 of the parameters' root mean square in float32, 4e-5 of it in float64. Not a share of
    their norm: along one direction a network of a million parameters bends as soon as one of a thousand. Measured
    against double backward on linear models, networks and a transformer of 1e6 parameters, at scales of 1e-6 to 1e6:
    errors of 3e-5 to 3e-4 in float32, below 1e-9 in float64.

    The floor, 1.5e-4 in float32 and 2e-10 in float64, is for parameters that begin at zero: those of which a change by
    1 matters then have errors of 5e-3 and 1e-5. Parameters whose own scale is below 1e-3 in float32 want a radius of
    their own; `mlotool check` tells how far products are from those of double backward.

    Example:
        >>> import torch
        >>> round(float(default_radius([torch.ones(4, dtype=torch.float64)])), 8)
        3.633e-05
    """
    root = float(torch.finfo(point[0].dtype).eps) ** (1 / 3)
    count = sum(tensor.numel() for tensor in point) // (num_tasks or 1)
    return 6.0 * root * (norm(point, num_tasks) / count**0.5).clamp_min(root)


_HIDDEN = "The loss may use detach: write mlotool.stop_gradient(x) in place of x.detach(), x.data and no_grad"
_KINKS = "The loss may have kinks, such as those of ReLU, abs and clamp"


def warn_of_differences(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    vector: Vector,
    radius: float | None = None,
    with_hessian: bool = False,
) -> None:
    """Warn, once a problem, where products by finite differences depend on how a difference is taken.

    It looks at the pullbacks 1, 10, 100 and so on: weights that begin as constants hide nothing that matters at first.

    `M^T q`, a difference in theta of gradients with respect to the inputs x, is compared with a difference in x of
    gradients with respect to theta: `|M^T q|^2 = <M M^T q, q>`. Values behind `detach`, `data`, `item` or
    `torch.no_grad` are constants for a gradient, and move with theta in the first one alone. `H q` is compared with
    itself at a quarter of the radius, where a jump of the gradient at a kink (ReLU) weighs four times as much.
    Random numbers go on as if nothing had been.

    Args:
        view: of the problem.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        vector: q.
        radius: of the finite differences; None takes `default_radius`.
        with_hessian: whether the pullback takes products with H, too.

    Cost of a look: five gradients and two evaluations; with H, nine gradients.

    Example:
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0].detach() * theta[0] * inputs[0]).sum()
        >>> theta, inputs = (torch.tensor([2.0]),), [torch.tensor([1.0])]
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_differences(LowerView(LowerProblem("w"), theta, loss), theta, inputs, [True], [torch.ones(1)])
        >>> str(caught[0].message)[:83]
        'problems.w.hypergradient: found products by finite differences with an error of 50%'
    """
    problem, traits = view.problem, view.problem.traits
    if traits.has_compared_product or problem.is_nested or is_tracing():
        return
    traits.num_pullbacks += 1
    if str(traits.num_pullbacks).rstrip("0") != "1":
        return
    length = float(norm(vector))
    if not 0.0 < length < math.inf:
        return
    point, values = leaves(theta), leaves(inputs, wanted)
    moved = chosen(values, wanted)
    reach = default_radius(constants(theta), problem.num_tasks) if radius is None else torch.tensor(radius)
    eps, random, shares = torch.finfo(theta[0].dtype).eps, RandomState(view.devices), {}

    def product(radius: Factor | None) -> FiniteDifferenceProduct:
        random.restore()
        return FiniteDifferenceProduct(view, theta, inputs, wanted, radius)

    with random.replayed(), torch.enable_grad():
        cross = product(radius).cross(vector)
        size, other = float(norm(cross)), product(None)
        push = other.own_push(cross)
        ahead, behind, inverse = other.ends(cross)
        slopes = slopes_of(view.own_loss(point, values), [*point, *moved])
        along = float(dot([slope.conj() for slope in slopes[len(point) :]], cross).real)
        pushed = float(dot(push, vector))
        # Of a straight-through estimator, whose gradient is not that of its value, a difference in x says nothing.
        is_smooth = abs((ahead - behind) * inverse - along) <= PRODUCTS * abs(along) + 100 * eps * abs(ahead) * inverse
        rounding = PRODUCT_ROUNDINGS * eps * length * float(norm(slopes))
        shortest = min(float(reach.min()), float(default_radius(constants(moved))))
        if is_smooth and abs(size**2 - pushed) > max(size**2, abs(pushed)) * PRODUCTS + size * rounding / shortest:
            shares[_HIDDEN] = abs(size**2 - pushed) / max(size**2, abs(pushed))
        if with_hessian:
            own, short = product(radius).own_hessian(vector), product(reach / 4).own_hessian(vector)
            size, error = max(float(norm(own)), float(norm(short))), float(norm(add(own, short, -1.0)))
            if error > size * PRODUCTS + 4 * rounding / float(reach.min()):
                shares[_KINKS] = error / size
    traits.has_compared_product = bool(shares)
    for reason, share in shares.items():
        warnings.warn(
            f"problems.{problem.name}.hypergradient: found products by finite differences with an error of "
            f"{share:.0%}; expected less than {PRODUCTS:.0%}. {reason}; or the radius may be too large. Or choose "
            "product: reverse; `mlotool check` compares them.",
            stacklevel=2,
        )


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

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> product = FiniteDifferenceProduct(view, theta, inputs, wanted=[True])
        >>> round(float(product.hessian([torch.ones(1)])[0]), 2), round(float(product.cross([torch.ones(1)])[0]), 2)
        (2.0, -2.0)
    """

    def __init__(
        self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool], radius: Factor | None = None
    ) -> None:
        super().__init__(view)
        self._loss = view
        self._theta = constants(theta)
        self._inputs = constants(inputs)
        self._wanted = tuple(wanted)
        self._radius = radius
        point, values, loss, devices = self._theta, self._inputs, view.own_loss, view.devices
        # Not a method of its own: a circle of references would keep the tensors until it is collected.
        self._replay = Replay(lambda: [loss(point, values)], devices, view.problem.traits)
        self._random = RandomState(devices) if view.eliminated else None
        # The pullbacks inside a loss evaluate losses in the backward pass, on random numbers of their own.
        size = sum(map(Tensor.numel, (*theta, *inputs)))
        self._is_joint = not view.problem.is_nested and size <= MOST_PARAMETERS_AT_ONCE

    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        # Tasks share nothing here, so each has a step of its own; in the cross product they share the inputs.
        scale, inverse = self._step(vector, self._theta, self._loss.problem.num_tasks)

        def side(loss: Loss, factor: Factor) -> list[Tensor]:
            point = [tensor.requires_grad_() for tensor in _moved(self._theta, vector, factor)]
            return [loss(point, self._inputs), *point]

        return self._difference(side, vector, scale, inverse)

    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`; not within a loss that has solutions inside."""
        scale, inverse = self._step(directions, chosen(self._inputs, self._wanted), None)

        def side(loss: Loss, factor: Factor) -> list[Tensor]:
            point = leaves(self._theta)
            return [loss(point, self._inputs_at(directions, factor)), *point]

        return self._difference(side, directions, scale, inverse)

    def ends(self, directions: Vector) -> tuple[float, float, float]:
        """Return the loss at both ends of a step of the inputs, and what makes their difference the slope along it.

        Args:
            directions: one for each wanted input, of its shape; the step is as long as the radius.
        """
        scale, inverse = self._step(directions, chosen(self._inputs, self._wanted), None)

        def value(factor: Factor) -> float:
            inputs = self._inputs_at(directions, factor)
            return float(self._replay(lambda: [self._loss.own_loss(self._theta, inputs).detach()])[0])

        return value(scale), value(-scale), float(inverse)

    def _inputs_at(self, directions: Vector, factor: Factor) -> list[Tensor]:
        there = iter(_moved(chosen(self._inputs, self._wanted), directions, factor))
        return [next(there) if flag else value for value, flag in zip(self._inputs, self._wanted, strict=True)]

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`."""
        scale, inverse = self._step(vector, self._theta, None)
        inputs = leaves(self._inputs, self._wanted)
        sources = chosen(inputs, self._wanted)

        def side(loss: Loss, factor: Factor) -> list[Tensor]:
            return [loss(_moved(self._theta, vector, factor), inputs), *sources]

        return self._difference(side, vector, scale, factor * inverse)

    def _difference(self, side: _Side, vector: Vector, scale: Factor, factor: Factor) -> list[Tensor]:
        """Return `factor` times a difference of gradients, with solutions inside the loss moved along."""
        replay, ahead = self._replay, self._loss.own_loss
        behind = ahead
        if self._loss.eliminated is not None:
            replay, ahead, behind = self._with_solutions(side, scaled(vector, scale))
        with torch.enable_grad():
            if self._is_joint:
                return _joint(replay(lambda: side(ahead, scale)), replay(lambda: side(behind, -scale)), factor)
            above = replay(lambda: _slopes(*side(ahead, scale)))
            return scaled(add(above, replay(lambda: _slopes(*side(behind, -scale))), -1.0), factor)

    def _with_solutions(self, side: _Side, step: Vector) -> tuple[Replay, Loss, Loss]:
        """Return how to evaluate, and the loss with the solutions inside it as they are after `step` and `-step`."""
        eliminated, random = self._loss.eliminated, self._random
        assert eliminated is not None and random is not None
        random.restore()
        moves = eliminated.push(self._theta, self._inputs, step)
        back = {name: [-move for move in vector] for name, vector in moves.items()}
        random.restore()

        def unmoved() -> list[Tensor]:
            with torch.enable_grad():
                return _slopes(*side(self._loss.own_loss, 0.0))

        # The pullbacks inside evaluate losses as well, more or fewer of them in either product.
        return (
            Replay(unmoved, self._loss.devices),
            lambda theta, inputs: eliminated.own_loss(theta, inputs, moves),
            lambda theta, inputs: eliminated.own_loss(theta, inputs, back),
        )

    def _step(self, vector: Vector, point: Vector, num_tasks: int | None) -> tuple[Factor, Factor]:
        """Return the factor that makes `vector` as long as the radius, and what undoes it in a difference."""
        radius = default_radius(point, num_tasks) if self._radius is None else self._radius
        tiny = torch.finfo(vector[0].dtype).tiny
        # A zero vector has a zero product: keep 0 * (radius / 0) away.
        if num_tasks is not None or is_tracing() or vector[0].is_cuda:
            length = norm(vector, num_tasks)
            return radius / length.clamp_min(tiny), length / (2.0 * radius)
        # A number of the CPU needs no tensors.
        size, reach = math.hypot(*[float(part_norm) for part_norm in torch._foreach_norm(list(vector))]), float(radius)
        return reach / max(size, tiny), size / (2.0 * reach)


def _slopes(value: Tensor, *sources: Tensor) -> list[Tensor]:
    return slopes_of(value, sources)


def _joint(above: Sequence[Tensor], below: Sequence[Tensor], factor: Factor) -> list[Tensor]:
    """Return `factor` times the gradient of one loss less that of another, each with its sources, by one pass."""
    (ahead, *sources), (behind, *others) = above, below
    if not (sources and ahead.requires_grad and behind.requires_grad):
        return zeros(sources)
    is_shared = sources[0] is others[0]
    # A number goes into the backward pass: that saves a pass over its result.
    number = factor if isinstance(factor, float) else 1.0
    points = sources if is_shared else [*sources, *others]
    slopes = gradient_of_difference(ahead, behind, points, number)
    whole = [torch.zeros_like(x) if slope is None else slope for x, slope in zip(points, slopes, strict=True)]
    whole = whole if is_shared else add(whole[: len(sources)], whole[len(sources) :])
    return whole if isinstance(factor, float) else scaled(whole, factor)


def _moved(point: Vector, vector: Vector, scale: Factor) -> list[Tensor]:
    if isinstance(scale, float):
        return list(torch._foreach_add(list(point), list(vector), alpha=scale))
    # One buffer: the step becomes the point.
    moved = scaled(vector, scale)
    torch._foreach_add_(moved, list(point))
    return moved
