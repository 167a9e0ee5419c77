"""Which product is taken, and whether it agrees with double backward.

Double backward keeps the graph of the gradient, and then the graph of its derivative. In forward mode each number of
one gradient carries its tangent along, and what is kept is what one backward pass needs.

| | double backward | forward mode |
|---|---|---|
| blocks are evaluated again (`remat` of the problem) | more memory, 1.1 to 1.4 times as long | taken |
| no blocks | taken | less memory, 1.1 to 1.4 times as long |

Memory of transformers of 32 layers, times of 8 layers of width 128 (benchmarks/mixflow, benchmarks/README.md).

Forward mode carries tangents through what double backward takes for a constant (`tensor.data`), and a function of one's
own may have a formula for one mode that is not that of the other. A finite difference sees through `detach` as well,
and depends on its radius. Nothing in a run would say so: products that are not those of double backward are compared
with them once a problem, on its real batch.
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import refuse_scripted
from mlotool.core.replay import LossTraits, RandomState
from mlotool.core.tangents import in_dual_level
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products.base import AbstractProduct, ReverseProduct
from mlotool.hypergradient.products.finite_difference import FiniteDifferenceProduct, default_radius
from mlotool.hypergradient.products.forward import ForwardProduct
from mlotool.hypergradient.solvers.base import Status
from mlotool.hypergradient.vector import add, norm, scaled
from mlotool.problem.interface import LowerView, Vector

_log = logging.getLogger("mlotool")

# Relative differences from products of double backward that are refused in forward mode.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-2}
_TOLERANCE_OF_AUTOCAST = 0.1

# One from which on there is a warning of finite differences.
_TOLERANCE_OF_DIFFERENCES = 0.1

# Of the gradient (its norm times the type's eps): two gradients that differ by less may be equal but for rounding.
_ROUNDINGS = 100

# Where a parameter has no gradient, as below a last layer that begins at zero, the next pullbacks are looked at too.
_MOST_COMPARISONS = 8

_DIFFERENT = (
    "problems.{problem}.hypergradient.product: found forward, whose product with {what} differs from that of double "
    "backward by {error:.2g} of its size; expected the same up to rounding. Write tensor.detach() for tensor.data, "
    "correct the jvp of your autograd.Functions, or write product: reverse."
)
_ELSEWHERE = (
    "problems.{problem}.hypergradient.product: found forward, whose products another rank has found to fail; expected "
    "the same on all ranks. See the error of that one."
)
_NOT_COMPARED = "problems.%s.hypergradient: products %s were not compared with double backward: %s."
_INEXACT = (
    "problems.{problem}: the product with {what} by finite differences, at a radius of {radius:.1e}, differs by "
    "{error:.0%} from that of double backward; expected less than {tolerance:.0%}. Write mlotool.stop_gradient(x) in "
    "place of x.detach(), data, item or torch.no_grad; where the gradient has kinks (ReLU, abs, max-pooling) or bends "
    "within the radius, choose product: reverse, or another hypergradient.radius."
)


def takes_forward(setting: str, has_blocks: bool, is_nested: bool) -> bool:
    """Return whether products are taken by forward mode.

    Args:
        setting: `product` of the hypergradient.
        has_blocks: whether blocks of the problem's module are evaluated again.
        is_nested: whether solutions of lower problems are in its loss.

    Example:
        >>> takes_forward("auto", has_blocks=True, is_nested=False)
        True
    """
    return setting == "forward" or (setting == "auto" and has_blocks and not is_nested)


def chosen_product(setting: str, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> str:
    """Return the product to take, which was compared with double backward if it is forward mode.

    Args:
        setting: `product` of the hypergradient.
        view: of the problem.
        theta: the point.
        inputs: what shapes it.
        wanted: which of the inputs want a cotangent.

    Raises:
        ConfigError: forward mode was asked for, and the loss has no tangents or other ones.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = (torch.tensor([2.0]),), [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w", has_blocks=True), theta, loss)
        >>> chosen_product("auto", view, theta, inputs, [True])
        'forward'
    """
    problem, traits = view.problem, view.problem.traits
    if not takes_forward(setting, problem.has_blocks, problem.is_nested):
        return "reverse" if setting == "auto" else setting
    # Forward mode has one level: within a product of a problem above, what is solved here takes double backward.
    if in_dual_level() or traits.lacks_tangents:
        return "reverse"
    try:
        check_forward_product(view, theta, inputs, wanted)
    except Exception as error:
        # An error of the user's own code comes again by double backward.
        if setting != "auto":
            raise
        traits.lacks_tangents = True
        _log.info("problems.%s.hypergradient: product auto takes reverse. %s", problem.name, error)
        return "reverse"
    return "forward"


def check_forward_product(view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> None:
    """Compare `H u` and `M^T u` with those of double backward along a random direction, once a problem.

    Each rank compares on its own part of the batch, and where one of them fails, all do.

    Args:
        view: of the problem.
        theta: the point.
        inputs: what shapes the problem.
        wanted: which of the inputs want a cotangent.

    Raises:
        ConfigError: they differ.

    Example:
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = (torch.tensor([2.0]),), [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), theta, loss)
        >>> check_forward_product(view, theta, inputs, (True,))  # nothing to refuse
    """
    problem, traits = view.problem, view.problem.traits
    if traits.has_compared_product or in_dual_level():
        return
    is_partial, lacks_memory, failure = False, False, None
    try:
        is_partial = _compare_forward(view, theta, inputs, wanted)
    except torch.OutOfMemoryError:
        lacks_memory = True
    except Exception as error:
        failure = error
    # What one rank raised alone would leave the others waiting for it.
    flags = problem.rank_mean.any([failure is not None, lacks_memory, is_partial], theta[0].device)
    has_failed, lacks_memory, is_partial = flags
    if failure is not None:
        raise failure
    if has_failed:
        raise ConfigError(_ELSEWHERE.format(problem=problem.name))
    traits.num_comparisons += 1
    traits.has_compared_product = lacks_memory or not is_partial or traits.num_comparisons >= _MOST_COMPARISONS
    if lacks_memory:
        _log.info(_NOT_COMPARED, problem.name, "by forward mode", "it does not fit into memory")


def _compare_forward(view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> bool:
    """Refuse products of another size, and return whether a parameter has no gradient. Arguments as above."""
    problem, dtype = view.problem, theta[0].dtype
    if problem.module is not None:
        refuse_scripted([problem.module], problem.name)
    is_full = problem.precision == "fp32"
    tolerance = _TOLERANCES.get(dtype, _TOLERANCE_OF_AUTOCAST) if is_full else _TOLERANCE_OF_AUTOCAST
    apart = _Apart(view, theta, inputs, wanted, random_direction(theta), ForwardProduct)
    # A product of about zero is rounding: what counts is its size beside the gradient's, by which it would change.
    floor = tolerance * torch.finfo(dtype).eps ** 0.5 * (apart.gradient_norm + apart.curvature_norm)
    for what, (error, size) in apart.errors.items():
        if error > tolerance * size + floor:
            raise ConfigError(_DIFFERENT.format(problem=problem.name, what=what, error=error / size))
    return apart.is_partial


def warn_of_differences(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    direction: Vector,
    *,
    radius: float | None = None,
    with_hessian: bool = False,
) -> None:
    """Warn where products by finite differences are not those of double backward; once a problem.

    Where they are not, no failure of a solve is put down to the curvature from then on. Random numbers go on as if
    nothing had been.

    Args:
        view: the loss.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        direction: of the products; nothing is learned from zero, so the next call tries again.
        radius: of the finite differences.
        with_hessian: whether the pullback takes products with H, beside those with M.

    Example:
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0].detach() * theta[0] * inputs[0]).sum()
        >>> theta, inputs = (torch.tensor([2.0]),), [torch.tensor([1.0])]
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_differences(LowerView(LowerProblem("w"), theta, loss), theta, inputs, [True], [torch.ones(1)])
        >>> str(caught[0].message)[:99]
        'problems.w: the product with M by finite differences, at a radius of 5.9e-02, differs by 50% from t'
    """
    problem, traits = view.problem, view.problem.traits
    if traits.has_compared_product or problem.is_nested or is_tracing():
        return
    length = float(norm(direction))
    if not 0 < length < math.inf:
        return
    traits.num_comparisons += 1
    # What double backward finds out about the loss says nothing of its finite differences.
    other = replace(view, problem=replace(problem, traits=LossTraits()))
    try:
        apart = _Apart(other, theta, inputs, wanted, direction, partial(FiniteDifferenceProduct, radius=radius))
    except (ConfigError, RuntimeError) as error:
        # Losses without a second derivative, or without the memory for one, are what finite differences are for.
        traits.has_compared_product = True
        _log.info(_NOT_COMPARED, problem.name, "by finite differences", str(error).partition("\n")[0])
        return
    traits.has_compared_product = not apart.is_partial or traits.num_comparisons >= _MOST_COMPARISONS
    used = radius or float(default_radius(theta))
    floor = _ROUNDINGS * torch.finfo(theta[0].dtype).eps * apart.gradient_norm * length / (2 * used)
    for what, (distance, size) in apart.errors.items():
        if distance > _TOLERANCE_OF_DIFFERENCES * size and (what == "M" or (with_hessian and distance > floor)):
            traits.has_compared_product = True
            traits.warned_of |= {Status.NEGATIVE_CURVATURE, Status.SINGULAR, Status.DIVERGED, Status.INACCURATE}
            text = _INEXACT.format(
                problem=problem.name, what=what, radius=used, error=distance / size, tolerance=_TOLERANCE_OF_DIFFERENCES
            )
            warnings.warn(text, stacklevel=2)
            return


class _Apart:
    """How far products are from those of double backward, on the same random numbers.

    Args:
        view, theta, inputs, wanted: of the problem.
        direction: u.
        make: makes the products from these.

    Attributes:
        errors: by product ("H", "M"), the norm of the difference and the larger norm, where the exact one has numbers.
        gradient_norm: of the loss's gradient.
        curvature_norm: of `H u`.
        is_partial: whether a parameter has a gradient of zero throughout.
    """

    def __init__(
        self,
        view: LowerView,
        theta: Vector,
        inputs: Vector,
        wanted: Sequence[bool],
        direction: Vector,
        make: Callable[[LowerView, Vector, Vector, Sequence[bool]], AbstractProduct],
    ) -> None:
        random = RandomState(view.devices)
        with random.replayed():
            reverse = ReverseProduct(view, theta, inputs, wanted)
            gradient = reverse.gradient
            # In one pass, which frees the graph on its way: it is what takes the most memory of a run.
            exact = dict(zip("HM", reverse.pull(direction), strict=True))
            del reverse
        with random.replayed():
            found = dict(zip("HM", make(view, theta, inputs, wanted).pull(direction), strict=True))
        self.gradient_norm, self.curvature_norm = float(norm(gradient)), float(norm(exact["H"]))
        self.is_partial = not all(bool(each.any()) for each in gradient)
        self.errors: dict[str, tuple[float, float]] = {}
        for what, product in found.items():
            size = float(norm(exact[what])) if product else math.nan
            if math.isfinite(size):
                self.errors[what] = float(norm(add(product, exact[what], -1.0))), max(size, float(norm(product)))


def random_direction(theta: Vector) -> list[Tensor]:
    """Return a direction, the same each time, about as long as the parameters.

    Example:
        >>> bool(random_direction([torch.zeros(2)])[0].any())
        True
    """
    found = []
    for number, tensor in enumerate(theta):
        generator = torch.Generator(tensor.device).manual_seed(number)
        found.append(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device))
    length, size = norm(theta), norm(found)
    return scaled(found, torch.where(length > 0, length, 1.0) / torch.where(size > 0, size, 1.0))
