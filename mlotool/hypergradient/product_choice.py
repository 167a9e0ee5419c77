"""Which second-order product `product: auto` takes, and whether products by forward mode are those by double backward.

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
from collections.abc import Sequence

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import refuse_scripted
from mlotool.core.replay import RandomState
from mlotool.core.tangents import in_dual_level
from mlotool.hypergradient.products import ForwardProduct, ReverseProduct
from mlotool.hypergradient.vector import add, norm, scaled
from mlotool.problem.interface import LowerView, Vector

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
