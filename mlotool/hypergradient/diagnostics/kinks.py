"""Whether products with H by finite differences see kinks of the loss.

At a kink (ReLU, abs, max-pooling, clamp, a hinge) the gradient jumps, by J say. One within the radius e adds J / 2e to
a product: nothing that double backward sees, and the more the shorter the radius. A quarter of the radius tells: there
a jump that is still met counts four times as much, another one not at all, and what is smooth changes by e squared.
Cross products are differences of losses, which do not jump: `diagnostics/radius.py` judges them.
"""

import math
import warnings
from collections.abc import Sequence

import torch

from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products import FiniteDifferenceProduct, default_radius
from mlotool.hypergradient.solvers import SolveResult, Status
from mlotool.hypergradient.vector import add, apart, norm
from mlotool.problem.interface import LowerView, Vector

TOLERANCE = 0.1
"""Relative difference of two products from which on there is a warning."""

NUM_SOLVES = 3
"""The first solves of a problem, whose products are judged: a short radius meets a kink now and then."""

_ROUNDINGS = 100
"""Of the gradient (its norm times the type's eps): a difference below it may be nothing else."""

_SMOOTH = 1 / 4, 1 / 64
"""What a quarter of a radius leaves of an error of truncation is between these: about a sixteenth."""

_KINKS = (
    "the gradient of its loss jumps within the radius, as at the kinks of ReLU, abs, max-pooling, clamp or a hinge; "
    "the jump is divided by the radius, and the curvature of the loss is not at fault where a solve breaks down"
)
_SHARE = 0.03
"""Of the parameters' norm: the shorter radius where the other one is longer than that."""

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
        if apart(own, other) > TOLERANCE and jump > _ROUNDINGS * eps * float(norm(product.gradient())):
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
