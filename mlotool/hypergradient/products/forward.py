"""Second-order products by forward mode over reverse mode, when they are taken, and whether they agree with reverse.

Double backward keeps the graph of the gradient, and then the graph of its derivative. In forward mode,
`d/de grad C(x + e d)` at e = 0, each number of one gradient carries its tangent along, and what is kept is what one
backward pass needs.

| | double backward | forward mode |
|---|---|---|
| blocks are evaluated again (`remat` of the problem) | more memory, 1.1 to 1.4 times as long | taken |
| no blocks | taken | less memory, 1.1 to 1.4 times as long |

Memory of transformers of 32 layers, times of 8 layers of width 128 (benchmarks/mixflow, benchmarks/README.md).

Forward mode carries tangents through what double backward takes for a constant (`tensor.data`), and a function of one's
own may have a formula for one mode that is not that of the other. Nothing in a run would say so: products in forward
mode are compared with those of double backward once a problem, on its real batch.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import forward_mode, refuse_scripted
from mlotool.core.gradient import dense
from mlotool.core.replay import RandomState
from mlotool.core.tangents import apart, dual_level, in_dual_level, joined
from mlotool.core.unchanged import FORWARD_MODE
from mlotool.hypergradient.products.base import AbstractProduct, PairedLoss, ReverseProduct
from mlotool.hypergradient.vector import add, chosen, constants, norm, scaled
from mlotool.problem.interface import LowerView, Vector

# How tensors move, one for each; None where one stays.
Tangents = Sequence[Tensor | None]


def moving_gradient(
    loss: Callable[[Vector], Tensor],
    points: Vector,
    tangents: Tangents,
    wanted: Sequence[bool],
    *,
    problem: str = "",
    seed: float = 1.0,
    is_nested: bool = False,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradient of a loss with respect to some of its arguments, and how it moves.

    Args:
        loss: of tensors, 0-D.
        points: its arguments.
        tangents: how they move.
        wanted: with respect to which of them.
        problem: whose loss it is, for messages.
        seed: the loss is taken that many times.
        is_nested: whether autograd is called inside the loss, as by solutions of other problems: then by
            `torch.autograd`, whose graph has the tangents too, else by `torch.func`.

    Raises:
        ConfigError: the loss has an operator without a derivative in forward mode.

    Returns:
        A tensor for each wanted argument, twice; None where the loss does not depend on it, or its gradient stays.

    Example:
        >>> cube = lambda tensors: (tensors[0] ** 3 * tensors[1]).sum()  # its second derivative is 6 x y = 36
        >>> moving_gradient(cube, [torch.tensor([2.0]), torch.tensor([3.0])], [torch.ones(1), None], [True, False])
        ([tensor([36.])], [tensor([36.])])
    """
    with dual_level(), forward_mode(problem):
        still = [_unshared(point.detach()) for point in points]
        take = _by_autograd if is_nested else _by_transform
        return apart(take(loss, still, tangents, wanted, seed))


def _unshared(point: Tensor) -> Tensor:
    """Return a tensor whose entries have places of their own, as its tangent's: tasks may share one start."""
    is_shared = any(step == 0 and size > 1 for step, size in zip(point.stride(), point.shape, strict=True))
    return point.contiguous() if is_shared else point


def _by_transform(
    loss: Callable[[Vector], Tensor], points: Vector, tangents: Tangents, wanted: Sequence[bool], seed: float
) -> Sequence[Tensor | None]:
    moving = joined(points, tangents)

    def function(*sources: Tensor) -> Tensor:
        remaining = iter(sources)
        return loss([next(remaining) if flag else point for point, flag in zip(moving, wanted, strict=True)])

    sources = chosen(moving, wanted)
    value, pull = torch.func.vjp(function, *sources)[:2]
    pulled: Sequence[Tensor] = pull(torch.full_like(value, seed), retain_graph=False, create_graph=False)
    return pulled


def _by_autograd(
    loss: Callable[[Vector], Tensor], points: Vector, tangents: Tangents, wanted: Sequence[bool], seed: float
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        leaves = [point.requires_grad_(flag) for point, flag in zip(points, wanted, strict=True)]
        value = loss(joined(leaves, tangents))
        sources = chosen(leaves, wanted)
        if not value.requires_grad or not sources:
            return [None] * len(sources)
        return dense(torch.autograd.grad([value], sources, [torch.full_like(value, seed)], allow_unused=True))


class ForwardProduct(AbstractProduct):
    """Tangents of a gradient: `H u = d/de F(theta + e u)`, where the loss is evaluated anew for each product.

    With blocks that are evaluated again (`remat` of a problem) the memory is that of the blocks' inputs with their
    tangents, and of one block. All evaluations see the same random numbers. Solutions of lower problems inside the loss
    move along, by their own derivative.

    In fp16 the loss is scaled by a constant, and vectors to norm 1, so that neither pass underflows.

    Cost: a gradient with tangents a product, about 3 gradients; `pull` gives `H u` and `M^T u` for one.

    Source: Pearlmutter 1994, Fast Exact Multiplication by the Hessian; Kemaev et al. 2025 (MixFlow-MG), section 3.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> ForwardProduct(view, theta, inputs, wanted=[True]).pull([torch.ones(1)])
        ([tensor([2.])], [tensor([-2.])])
    """

    def __init__(self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> None:
        super().__init__(view)
        self._problem = view.problem
        self._points = [*constants(theta), *constants(inputs)]
        self._count = len(theta)
        self._of_inputs = [*[False] * len(theta), *wanted]
        self._of_theta = [*[True] * len(theta), *[False] * len(inputs)]
        self._loss = PairedLoss(view)

    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        return self._along(vector, self._of_theta, self._of_theta)

    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`."""
        return self._along(directions, self._of_inputs, self._of_theta)

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`."""
        product = self._along(vector, self._of_theta, self._of_inputs)
        return product if factor == 1.0 else scaled(product, factor)

    def pull(self, vector: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """Return `H u` and `M^T u` of this rank's part of the batch, from one evaluation."""
        both = [a or b for a, b in zip(self._of_theta, self._of_inputs, strict=True)]
        products = self._along(vector, self._of_theta, both)
        return products[: self._count], products[self._count :]

    def _along(self, direction: Vector, moving: Sequence[bool], wanted: Sequence[bool]) -> list[Tensor]:
        """Return how the gradient with respect to the wanted points moves along a direction of the moving ones."""
        count, sources = self._count, chosen(self._points, wanted)

        def tangents(vector: Vector) -> list[Tensor]:
            parts = iter(vector)
            moves = moving_gradient(
                lambda points: self._loss(points[:count], points[count:]),
                self._points,
                [next(parts) if flag else None for flag in moving],
                wanted,
                problem=self._problem.name,
                seed=self._scale or 1.0,
                is_nested=self._problem.is_nested,
            )[1]
            return [torch.zeros_like(x) if move is None else move for x, move in zip(sources, moves, strict=True)]

        return self._normalised(direction, tangents)


_log = logging.getLogger("mlotool")

# Where a parameter has no gradient, as below a last layer that begins at zero, the next pullbacks are looked at too.
_MOST_COMPARISONS = 8

_DIFFERENT = (
    "problems.{problem}.hypergradient.product: found forward, whose product with {what} differs from that of double "
    "backward by {error:.2g} (relative); expected the same up to rounding. Write tensor.detach() for tensor.data, "
    "correct the jvp of your autograd.Functions, or write product: reverse."
)
_ELSEWHERE = (
    "problems.{problem}.hypergradient.product: found forward, whose products are wrong on another rank; expected right "
    "products on all ranks. See the error of that rank."
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
        _log.info("problems.%s.hypergradient: product auto chooses reverse. %s", problem.name, error)
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
    is_partial, failure = False, None
    try:
        is_partial = _compare_forward(view, theta, inputs, wanted)
    except Exception as error:
        failure = error
    lacks_memory = isinstance(failure, torch.OutOfMemoryError)
    # What one rank raised alone would leave the others waiting for it.
    flags = [failure is not None and not lacks_memory, lacks_memory, is_partial]
    has_failed, lacks_memory, is_partial = problem.rank_mean.any(flags, theta[0].device)
    if has_failed:
        raise failure or ConfigError(_ELSEWHERE.format(problem=problem.name))
    traits.num_comparisons += 1
    traits.has_compared_product = lacks_memory or not is_partial or traits.num_comparisons >= _MOST_COMPARISONS
    if lacks_memory:
        _log.info(
            "problems.%s: forward products were not compared: double backward takes too much memory.", problem.name
        )


def _compare_forward(view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> bool:
    """Refuse products of another size, and return whether a parameter has no gradient. Arguments as above."""
    problem, dtype = view.problem, theta[0].dtype
    if problem.module is not None:
        refuse_scripted([problem.module], problem.name)
    tolerance = FORWARD_MODE.of(dtype) if problem.precision == "fp32" else FORWARD_MODE.half
    direction, random = random_direction(theta), RandomState(view.devices)
    with random.replayed():
        reverse = ReverseProduct(view, theta, inputs, wanted)
        gradient = reverse.gradient
        # In one pass, which frees the graph on its way: it is what takes the most memory of a run.
        exact = reverse.pull(direction)
        del reverse
    with random.replayed():
        products = ForwardProduct(view, theta, inputs, wanted).pull(direction)
    # A product of about zero is rounding: what counts is its size beside the gradient's, by which it would change.
    floor = tolerance * torch.finfo(dtype).eps ** 0.5 * (float(norm(gradient)) + float(norm(exact[0])))
    for what, product, right in zip("HM", products, exact, strict=True):
        length = float(norm(right)) if product else math.nan
        if math.isfinite(length):
            error, size = float(norm(add(product, right, -1.0))), max(length, float(norm(product)))
            if error > tolerance * size + floor:
                raise ConfigError(_DIFFERENT.format(problem=problem.name, what=what, error=error / size))
    return not all(bool(slope.any()) for slope in gradient)


def random_direction(theta: Vector) -> list[Tensor]:
    """Return a direction, the same each time, about as long as the parameters.

    Example:
        >>> bool(random_direction([torch.zeros(2)])[0].any())
        True
    """
    direction = []
    for number, tensor in enumerate(theta):
        generator = torch.Generator(tensor.device).manual_seed(number)
        direction.append(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device))
    length, size = norm(theta), norm(direction)
    return scaled(direction, torch.where(length > 0, length, 1.0) / torch.where(size > 0, size, 1.0))
