"""Second-order products by forward mode over reverse mode, and where `product: auto` takes them.

    d/de grad C(x + e d)  at e = 0

Double backward keeps the graph of the gradient, and then the graph of its derivative. Here each number of one gradient
carries its tangent along, and what is kept is what one backward pass needs.

| | double backward | forward mode |
|---|---|---|
| blocks are evaluated again (`remat` of the problem) | more memory, 1.1 to 1.4 times as long | taken |
| no blocks | taken | less memory, 1.1 to 1.4 times as long |

Memory of transformers of 32 layers, times of 8 layers of width 128 (benchmarks/mixflow, benchmarks/README.md).

Forward mode carries tangents through what double backward takes for a constant (`tensor.data`), and a function of one's
own may have a formula for one mode that is not that of the other. The results differ then by as much as their size, and
nothing in a run would say so: they are compared once a problem, on its real batch.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import forward_mode, refuse_scripted
from mlotool.core.gradient import dense
from mlotool.core.replay import RandomState
from mlotool.core.tangents import apart, dual_level, in_dual_level, joined
from mlotool.hypergradient.products.base import AbstractProduct
from mlotool.hypergradient.products.reverse import FP16_LOSS_SCALE, ReverseProduct
from mlotool.hypergradient.vector import add, constants, norm, scaled
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
        still = [_unshared(each.detach()) for each in points]
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
        given = iter(sources)
        return loss([next(given) if flag else point for point, flag in zip(moving, wanted, strict=True)])

    sources = [point for point, flag in zip(moving, wanted, strict=True) if flag]
    value, pull = torch.func.vjp(function, *sources)[:2]
    found: Sequence[Tensor] = pull(torch.full_like(value, seed), retain_graph=False, create_graph=False)
    return found


def _by_autograd(
    loss: Callable[[Vector], Tensor], points: Vector, tangents: Tangents, wanted: Sequence[bool], seed: float
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        leaves = [point.requires_grad_(flag) for point, flag in zip(points, wanted, strict=True)]
        value = loss(joined(leaves, tangents))
        sources = [leaf for leaf, flag in zip(leaves, wanted, strict=True) if flag]
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
        self._view = view
        self._points = [*constants(theta), *constants(inputs)]
        self._count = len(theta)
        self._of_inputs = [*[False] * len(theta), *wanted]
        self._of_theta = [*[True] * len(theta), *[False] * len(inputs)]
        self._scale = FP16_LOSS_SCALE if view.problem.precision == "fp16" else None
        self._random: RandomState | None = None

    def own_hessian(self, vector: Vector) -> list[Tensor]:
        """Return `H u`."""
        return self._along(vector, self._of_theta, self._of_theta)

    def own_push(self, directions: Vector) -> list[Tensor]:
        """Return `M d`."""
        return self._along(directions, self._of_inputs, self._of_theta)

    def cross(self, vector: Vector, factor: float = 1.0) -> list[Tensor]:
        """Return `factor M^T q`."""
        found = self._along(vector, self._of_theta, self._of_inputs)
        return found if factor == 1.0 else scaled(found, factor)

    def pull(self, vector: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """Return `H u` and `M^T u` of this rank's part of the batch, from one evaluation."""
        both = [a or b for a, b in zip(self._of_theta, self._of_inputs, strict=True)]
        found = self._along(vector, self._of_theta, both)
        return found[: self._count], found[self._count :]

    def _along(self, direction: Vector, moving: Sequence[bool], wanted: Sequence[bool]) -> list[Tensor]:
        """Return how the gradient with respect to the wanted points moves along a direction of the moving ones."""
        length = None if self._scale is None else norm(direction).clamp_min(torch.finfo(torch.float32).tiny)
        given = iter(direction if length is None else scaled(direction, 1.0 / length))
        count, own_loss = self._count, self._view.own_loss
        self._rewind()
        found = moving_gradient(
            lambda points: own_loss(points[:count], points[count:]),
            self._points,
            [next(given) if flag else None for flag in moving],
            wanted,
            problem=self._view.problem.name,
            seed=self._scale or 1.0,
            is_nested=self._view.problem.is_nested,
        )[1]
        sources = [point for point, flag in zip(self._points, wanted, strict=True) if flag]
        tangents = [torch.zeros_like(x) if each is None else each for x, each in zip(sources, found, strict=True)]
        return tangents if length is None or self._scale is None else scaled(tangents, length / self._scale)

    def _rewind(self) -> None:
        """Begin at the random numbers of the first evaluation."""
        if self._random is None:
            self._random = RandomState(self._view.devices)
        else:
            self._random.restore()


_log = logging.getLogger("mlotool")


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
        check_forward_product(view, theta, inputs, tuple(wanted))
    except Exception as error:
        # An error of the user's own code comes again by double backward.
        if setting != "auto":
            raise
        traits.lacks_tangents = True
        _log.info("problems.%s.hypergradient: product auto takes reverse. %s", problem.name, error)
        return "reverse"
    return "forward"


_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-2}
_TOLERANCE_OF_AUTOCAST = 0.1

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


def check_forward_product(view: LowerView, theta: Vector, inputs: Vector, wanted: tuple[bool, ...]) -> None:
    """Compare `H u` and `M^T u` with those of double backward along a random direction, once a problem.

    Where a parameter has no gradient at all, as below a last layer that begins at zero, the next pullbacks are looked
    at too, a few of them. Each rank compares on its own part of the batch, and where one of them fails, all do.

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
    traits = view.problem.traits
    if traits.has_compared_forward or in_dual_level():
        return
    is_whole, has_memory, failure = True, True, None
    try:
        is_whole = _compare(view, theta, inputs, wanted)
    except torch.OutOfMemoryError:
        has_memory = False
    except Exception as error:
        failure = error
    # What one rank raised alone would leave the others waiting for it.
    flags = [failure is not None, not has_memory, not is_whole]
    has_failed, lacks_memory, is_partial = view.problem.rank_mean.any(flags, theta[0].device)
    if failure is not None:
        raise failure
    if has_failed:
        raise ConfigError(_ELSEWHERE.format(problem=view.problem.name))
    traits.num_comparisons += 1
    traits.has_compared_forward = lacks_memory or not is_partial or traits.num_comparisons >= _MOST_COMPARISONS
    if lacks_memory:
        _log.info(
            "problems.%s.hypergradient: products by forward mode were not compared with double backward, which does "
            "not fit into memory.",
            view.problem.name,
        )


def _compare(view: LowerView, theta: Vector, inputs: Vector, wanted: tuple[bool, ...]) -> bool:
    """Compare products, and return whether every parameter had a gradient. Arguments as above.

    Raises:
        ConfigError: they differ.
        torch.OutOfMemoryError: double backward does not fit.
    """
    if view.problem.module is not None:
        refuse_scripted([view.problem.module], view.problem.name)
    random = RandomState(view.devices)
    with random.replayed():
        reverse = ReverseProduct(view, theta, inputs, wanted)
        gradient = reverse.gradient
        direction = _direction(theta)
        # In one pass, which frees the graph on its way: it is what takes the most memory of a run.
        expected = dict(zip("HM", reverse.pull(direction), strict=True))
        del reverse
    with random.replayed():
        hessian, cross = ForwardProduct(view, theta, inputs, wanted).pull(direction)
    is_full = view.problem.precision == "fp32"
    tolerance = _TOLERANCES.get(theta[0].dtype, _TOLERANCE_OF_AUTOCAST) if is_full else _TOLERANCE_OF_AUTOCAST
    # A product of about zero is rounding: what counts is its size beside the gradient's, by which it would change.
    floor = tolerance * torch.finfo(theta[0].dtype).eps ** 0.5 * (norm(gradient) + norm(expected["H"]))
    for what, found in {"H": hessian, "M": cross}.items():
        if not found:
            continue
        error = norm(add(found, expected[what], -1.0))
        size = torch.maximum(norm(found), norm(expected[what]))
        # Numbers that double backward does not have either tell nothing.
        is_known = bool(norm(expected[what]).isfinite())
        if is_known and not bool(error <= tolerance * size + floor):
            share = float(error / size)
            raise ConfigError(_DIFFERENT.format(problem=view.problem.name, what=what, error=share))
    return all(bool(each.any()) for each in gradient)


def _direction(theta: Vector) -> list[Tensor]:
    """Return a direction, the same each time, about as long as the parameters."""
    found = []
    for number, tensor in enumerate(theta):
        generator = torch.Generator(tensor.device).manual_seed(number)
        found.append(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device))
    length, size = norm(theta), norm(found)
    return scaled(found, torch.where(length > 0, length, 1.0) / torch.where(size > 0, size, 1.0))
