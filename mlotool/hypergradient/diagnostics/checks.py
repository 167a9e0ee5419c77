"""What is looked at once a problem, or now and then: what finite differences would miss, and how exact a pullback is.

- The radius. With one that is right a quarter of it changes nothing: truncation falls by sixteen and rounding grows by
  four. It is wrong where the scale of the parameters is not that of the loss.
- Kinks (ReLU, abs, max-pooling, clamp, a hinge), at which the gradient jumps, by J say. One within the radius e adds
  J / 2e to a product with H: nothing that double backward sees, and the more the shorter the radius. Cross products are
  differences of losses, which do not jump.
- Hidden values: `x.detach()`, `x.data`, `x.item()` and what is computed under `torch.no_grad()` are constants for
  double backward, but move with the parameters in a finite difference. Each product is taken twice, with those values
  free and held, at the same radius and on the same random numbers: what sets the two apart can be nothing else.
- Quality: the residual of a solve, and the cosine to a converged one.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mlotool.core.rematerialization import without_remat
from mlotool.core.replay import LossTraits, RandomState, outside_replay
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products import FiniteDifferenceProduct, ReverseProduct, default_radius
from mlotool.hypergradient.solvers import ConjugateGradient, Exact, NormalEquationConjugateGradient, SolveResult, Status
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, tasks_of
from mlotool.hypergradient.vector import add, apart, dot, leaves, norm
from mlotool.problem.interface import LowerView, Vector

# Relative difference of two products from which on there is a warning.
TOLERANCE = 0.1

# Of ten: the radii, over the one in use, among which a better one is looked for; as long as the parameters at most.
_POWERS = range(-7, 8)

# The shortest radius that is proposed, over the rounding of the parameters' norm (their norm times the type's eps).
_ROUNDINGS = 10


def warn_of_radius(
    view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool], direction: Vector, radius: float | None
) -> None:
    """Warn where `M^T q` by finite differences is another one at a quarter of the radius; once a problem.

    Products with H, which a kink of the loss (ReLU) changes at any radius, are judged by `diagnostics/kinks.py`.

    Args:
        view: the loss.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        direction: q; nothing is learned from zero, so the next call tries again.
        radius: in use; None is the default.

    Cost: two cross products, once; fifteen more with the warning. Random numbers go on as if nothing had been.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> warn_of_radius(view, theta, inputs, [True], direction=[torch.ones(1)], radius=None)  # nothing to say
    """
    traits = view.problem.traits
    if traits.has_measured_radius or is_tracing() or view.problem.is_nested:
        return
    if not 0 < float(norm(direction)) < math.inf:
        return
    traits.has_measured_radius = True
    used, random = radius or float(default_radius(theta)), RandomState(view.devices)

    def cross(radius: float) -> list[Vector]:
        random.restore()
        return [FiniteDifferenceProduct(view, theta, inputs, wanted, radius).cross(direction)]

    with random.replayed():
        [own], [other] = cross(used), cross(used / 4)
        share = apart(own, other)
        if share <= TOLERANCE:
            return
        radii = [used * 10.0**power for power in _POWERS if power <= 0 or used * 10.0**power <= float(norm(theta))]
        found = [cross(each)[0] for each in radii]
    # Where the parameters do not move any more but for rounding, products agree on nothing.
    floor = _ROUNDINGS * torch.finfo(theta[0].dtype).eps * float(norm(theta))
    shares = [
        apart(a, b) if radius >= floor and bool(norm(a) > 0) and bool(norm(b) > 0) else math.inf
        for radius, (a, b) in zip(radii, pairwise(found), strict=False)
    ]
    least, best = min(zip(shares, radii, strict=False))
    better = f"set its hypergradient.radius={best:.0e}, from where they differ by {least:.1%}"
    advice = f"Choose product: reverse, or {better}." if least <= TOLERANCE else "Choose product: reverse."
    warnings.warn(
        f"problems.{view.problem.name}: finite differences of its hypergradient at a radius of {used:.1e} and at a "
        f"quarter of it differ by {share:.0%}, with parameters of norm {float(norm(theta)):.1e}; expected less than "
        f"{TOLERANCE:.0%}. {advice}",
        stacklevel=2,
    )


# The first solves of a problem, whose products are judged: a short radius meets a kink now and then.
NUM_SOLVES = 3

# Of the gradient (its norm times the type's eps): a difference below it may be nothing else.
_KINK_ROUNDINGS = 100

# What a quarter of a radius leaves of an error of truncation is between these: about a sixteenth.
_SMOOTH = 1 / 4, 1 / 64

_KINKS = (
    "the gradient of its loss jumps within the radius, as at the kinks of ReLU, abs, max-pooling, clamp or a hinge; "
    "the jump is divided by the radius, and the curvature of the loss is not at fault where a solve breaks down"
)
# Of the parameters' norm: the shorter radius where the other one is longer than that.
_SHARE = 0.03

_BENDS = "the gradient of its loss bends within the radius, which is too long"
_PAST = "the radius is {ratio:.0f} times the norm of the parameters ({norm:.1e}): it leads past all that they are"


def warn_of_kinks(
    product: FiniteDifferenceProduct,
    view: LowerView,
    theta: Vector,
    directions: Sequence[Vector],
    result: SolveResult,
    failures: Sequence[Status],
) -> None:
    """Warn where products with H are others at a quarter of the radius, once a problem, and of no failure from then on.

    Judged are the first solves, and later ones that fail in a way that there was no warning of.

    Args:
        product: of the solve.
        view: the loss.
        theta: the point.
        directions: of the products; of one that is zero or not finite nothing is learned.
        result: how the solve ended.
        failures: statuses that its solver counts as failures.

    Cost: two products for each direction; one more with the warning, and a gradient. The products of a pullback all see
    the same random numbers, so these change none.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> product = FiniteDifferenceProduct(view, theta, inputs, [True])
        >>> result = SolveResult([], Status.FIXED, num_products=1)
        >>> warn_of_kinks(product, view, theta, [[torch.ones(1)]], result, ())  # nothing to say
    """
    traits = view.problem.traits
    is_new = result.status in failures and result.status not in traits.warned_of
    if is_tracing() or view.problem.is_nested or _KINKS in traits.warned_of:
        return
    if traits.num_judged_solves >= NUM_SOLVES and not is_new:
        return
    traits.num_judged_solves += 1
    radius, size, eps = float(product.radius.max()), float(norm(theta)), torch.finfo(theta[0].dtype).eps
    # Past the parameters both products may see nothing of the loss, and agree: the shorter radius is a share of these.
    share = _SHARE * size / radius if radius > size > 0 else 1 / 4
    for direction in directions:
        if not 0 < float(norm(direction)) < math.inf:
            continue
        own, other = product.hessian(direction), product.at(share).hessian(direction)
        difference = norm(add(own, other, -1.0)) / norm(direction)
        # What the gradients are apart by at the shorter radius, more than by the longer one.
        jump = float(difference) * 2 * share * radius
        if apart(own, other) > TOLERANCE and jump > _KINK_ROUNDINGS * eps * float(norm(product.gradient())):
            reason, advice = _KINKS, "Choose product: reverse, which sees no kinks"
            longer = float(default_radius([each.float() for each in theta]))
            rest = norm(add(other, product.at(share / 4).hessian(direction), -1.0)) / norm(direction)
            if radius > size > 0:
                reason, advice = _PAST, f"Choose product: reverse, or hypergradient.radius={share * radius:.0e}"
            elif _SMOOTH[1] < float(rest / difference) < _SMOOTH[0]:
                reason, advice = _BENDS, f"Choose product: reverse, or hypergradient.radius={share * radius / 4:.0e}"
            elif longer > 2 * radius:
                advice += f", or a longer radius, over which they average: hypergradient.radius={longer:.0e}"
            traits.warned_of |= {_KINKS, Status.NEGATIVE_CURVATURE, Status.SINGULAR, Status.DIVERGED, Status.INACCURATE}
            of_it = "a quarter" if share == 1 / 4 else f"{share:.0e}"
            reason = reason.format(ratio=radius / size if size else 0.0, norm=size)
            warnings.warn(
                f"problems.{view.problem.name}: finite differences of its gradient, the products with H, at a radius "
                f"of {radius:.1e} and at {of_it} of it differ by {apart(own, other):.0%}; expected less than "
                f"{TOLERANCE:.0%}: {reason}. {advice}.",
                stacklevel=2,
            )
            return


_HIDING = frozenset(
    {torch.detach, Tensor.detach, Tensor.data.__get__, Tensor.item, Tensor.tolist, Tensor.__float__}  # type: ignore[attr-defined]
)
_WARNING = (
    "problems.{problem}.loss: {share:.0%} of a finite difference comes from values that the loss hides from automatic "
    "differentiation (detach, data, item or torch.no_grad); expected constants. Write mlotool.stop_gradient(x) in "
    "place of x.detach(), or choose a hypergradient with product: reverse."
)


def warn_of_hidden_values(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    direction: Vector,
    *,
    radius: float | None = None,
    with_hessian: bool = False,
) -> None:
    """Warn where finite differences of a loss are not those of its automatic derivatives; once a problem.

    Random numbers go on as if nothing had been. Losses evaluated by `torch.vmap` (tasks) are not judged.

    Args:
        view: the loss.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        direction: of the products; nothing is learned from zero, so the next call tries again.
        radius: of the finite differences.
        with_hessian: whether the pullback takes products with H, beside those with M.

    Example:
        >>> import torch, warnings
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0].detach() * theta[0] * inputs[0]).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     warn_of_hidden_values(view, theta, inputs, [True], direction=[torch.ones(1)])
        >>> str(found[0].message)[:90]
        'problems.w.loss: 50% of a finite difference comes from values that the loss hides from aut'
    """
    # The solutions inside a loss are detached by the program itself.
    traits = view.problem.traits
    if traits.has_searched_hidden_values or is_tracing() or view.problem.is_nested:
        return
    if not 0 < float(norm(direction)) < math.inf:
        return
    traits.has_searched_hidden_values = True
    share = _hidden_share(view, theta, inputs, wanted, direction, radius, with_hessian)
    if share > TOLERANCE:
        warnings.warn(_WARNING.format(problem=view.problem.name, share=share), stacklevel=2)


def _hidden_share(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    direction: Vector,
    radius: float | None,
    with_hessian: bool,
) -> float:
    held, random = _Held(view), RandomState(view.devices)

    def products(function: Callable[[Vector, Vector], Tensor]) -> list[list[Tensor]]:
        random.restore()
        # What is found out about a loss with held values says nothing of the loss itself.
        loss = replace(view, own_loss=function, problem=replace(view.problem, traits=LossTraits()))
        product = FiniteDifferenceProduct(loss, theta, inputs, wanted, radius)
        curved = [product.own_hessian(direction)] if with_hessian else []
        return [*curved, product.cross(direction)]

    # What a compiled module does inside cannot be watched, nor what `remat` does in a backward pass.
    with random.replayed(), torch.compiler.set_stance("force_eager"), without_remat():
        try:
            held.record(leaves(theta), leaves(inputs, tuple(wanted)))
            return max(map(apart, products(view.own_loss), products(held))) if held.values else 0.0
        except (_OtherValuesError, torch.OutOfMemoryError):
            # The latter where there is no room for a loss without `remat`.
            return 0.0


class _OtherValuesError(Exception):
    """A loss hides more values at perturbed parameters than at the unperturbed ones."""


class _Held:
    """A loss whose hidden values are those of one evaluation.

    Args:
        view: the loss.
    """

    def __init__(self, view: LowerView) -> None:
        self._loss = view
        self.values: list[Any] = []

    def record(self, theta: Vector, inputs: Vector) -> None:
        """Take the values from an evaluation."""
        # Here a stop_gradient is a detach like any other.
        with torch.enable_grad(), outside_replay(), _Interception(None) as found:
            self._loss.own_loss(theta, inputs)
        self.values = found.values

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        with outside_replay(), _Interception(self.values):
            return self._loss.own_loss(theta, inputs)


class _Interception(TorchFunctionMode):
    """Records what a loss hides, or puts recorded values in its place.

    Args:
        values: in the order of the calls; None records.
    """

    def __init__(self, values: list[Any] | None) -> None:
        super().__init__()
        self.values: list[Any] = []
        self._given = None if values is None else iter(values)
        self._is_blocked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`; return what it returns, or what it returned before."""
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self._is_blocked = not args[0]
        if not self._hides(func, args, result):
            return result
        if self._given is None:
            self.values.append(_copied(result))
            return result
        try:
            return _copied(next(self._given))
        except StopIteration:
            raise _OtherValuesError from None

    def _hides(self, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        # The forward pass of an autograd.Function hides nothing: it runs without gradients, but without no_grad too.
        self._is_blocked = self._is_blocked and not torch.is_grad_enabled()
        if not torch.is_grad_enabled() and not self._is_blocked:
            return False
        if not isinstance(result, Tensor):
            return func in _HIDING
        # A tensor of torch.vmap has no value outside of it; a step in place must not be undone.
        if torch._C._functorch.is_functorch_wrapped_tensor(result) or any(result is each for each in args):
            return False
        return func in _HIDING or (self._is_blocked and result.is_floating_point())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# Up to here, of each task, the reference is the dense solve.
MAX_DENSE_PARAMETERS = 2000

# Of the reference's conjugate gradients beyond.
MAX_ITERATIONS = 500


@dataclass(frozen=True)
class Quality:
    """What a report says.

    Args:
        residual: `norm(H q - v) / norm(v)`; the largest over tasks.
        cosine: between the pullback's result, over all inputs together, and that of a converged solve; 0 where one of
            them alone is zero.

    Example:
        >>> Quality(residual=0.1, cosine=0.98).cosine
        0.98
    """

    residual: float
    cosine: float


def assess(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    vector: Vector,
    solution: Vector,
    found: Vector,
) -> Quality:
    """Compare a pullback with a converged one, by reverse products.

    Args:
        view: the loss; it is evaluated once.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        vector: v, the mean over ranks.
        solution: q.
        found: the cotangents of the wanted inputs.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> vector, half = [torch.ones(1)], [torch.tensor([0.5])]
        >>> assess(view, theta, inputs, [True], vector, solution=half, found=[torch.ones(1)])
        Quality(residual=0.0, cosine=1.0)
    """
    product, num_tasks = ReverseProduct(view, theta, inputs, wanted), view.problem.num_tasks

    lengths = norm(vector, num_tasks)
    errors = norm(add(product.hessian(solution), vector, -1.0), num_tasks)
    residual = torch.where(errors == 0, 0.0, errors / lengths)
    reference = list(torch._foreach_neg(product.cross(Converged().solve(product.hessian, vector, view=view).solution)))
    return Quality(float(residual.max()), _cosine(found, reference))


@dataclass(frozen=True)
class Converged(AbstractSolver):
    """The most exact solve that fits: dense, else conjugate gradients; on the normal equations for an indefinite H.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> Converged().solve(lambda u: [2.0 * u[0]], [torch.ones(1)], view=view).solution
        [tensor([0.5000])]
    """

    failures: ClassVar[Mapping[Status, str]] = {**ConjugateGradient.failures, **Exact.failures}

    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, view: LowerView | None = None
    ) -> SolveResult:
        """Return the solution, and how it ended."""
        size = sum(tensor.numel() for tensor in vector) // (tasks_of(view) or 1)
        if size <= MAX_DENSE_PARAMETERS:
            return Exact(max_parameters=MAX_DENSE_PARAMETERS).solve(matvec, vector, view=view)
        settings = MAX_ITERATIONS, torch.finfo(vector[0].dtype).eps ** 0.75
        result = ConjugateGradient(*settings).solve(matvec, vector, view=view)
        if result.status is Status.NEGATIVE_CURVATURE:
            result = NormalEquationConjugateGradient(*settings).solve(matvec, vector, view=view)
        return result


def _cosine(a: Vector, b: Vector) -> float:
    lengths = float(norm(a)), float(norm(b))
    if not all(lengths):
        return float(lengths[0] == lengths[1])
    # In two steps: the product of small lengths underflows.
    return float(dot(torch._foreach_div(list(a), lengths[0]), torch._foreach_div(list(b), lengths[1])))
