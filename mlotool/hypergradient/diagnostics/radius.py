"""Whether finite differences depend on their radius.

With a radius that is right a quarter of it changes nothing: truncation falls by sixteen and rounding grows by four. It
is wrong where the scale of the parameters is not that of the loss: all near zero, or one layer far from the others.
"""

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise

import torch

from mlotool.core.replay import RandomState
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products import FiniteDifferenceProduct, default_radius
from mlotool.hypergradient.vector import apart, norm
from mlotool.problem.interface import LowerView, Vector

TOLERANCE = 0.1
"""Relative difference of two products from which on there is a warning."""

_POWERS = range(-7, 8)
"""Of ten: the radii, over the one in use, among which a better one is looked for; as long as the parameters at most."""

_ROUNDINGS = 10
"""The shortest radius that is proposed, over the rounding of the parameters' norm (their norm times the type's eps)."""


def warn_of_radius(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    direction: Vector,
    radius: float | None,
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
