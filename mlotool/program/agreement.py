"""Whether two ways to take steps agree but for rounding, which is measured where it is more than usual."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

SAME = 0.75
"""Power of a rounding error up to which two gradients count as the same."""

ROUNDING = 32.0
"""Of what moving the parameters by one rounding error changes, how much another order of sums may."""

NUM_MOVES = 3
"""By chance a move may change little."""

Kind = tuple[str, str]
"""A problem, and what of it: its parameters, its buffers, or what its optimizer keeps under one name."""

Values = Mapping[Kind, Sequence[Tensor]]


def distances(expected: Values, found: Values, before: Values, unit: float) -> dict[Kind, float]:
    """Return how far two ends of a step are apart, relative to how far the first one is from its beginning.

    What rounding of the values themselves accounts for counts as nothing, and so do entries that are not finite in
    both.

    Args:
        expected: the end by the plans.
        found: the end by another way.
        before: the beginning; of what has none (a loss), 0.
        unit: the relative error of one rounding.

    Returns:
        By kind; infinite where one of both is not finite, or where numbers that are counted are others.
    """
    return {
        kind: _distance(ends, found[kind], before.get(kind) or [*map(torch.zeros_like, ends)], unit)
        for kind, ends in expected.items()
        if not all(map(_is_same, ends, found[kind]))
    }


def sensitivity(
    take: Callable[[Sequence[Tensor]], Values | None], parameters: Sequence[Tensor], before: Values, unit: float
) -> dict[Kind, float]:
    """Return what moving the parameters by one rounding error changes of a step, in the measure of `distances`.

    Far more than one rounding error where large terms cancel, and in finite differences.

    Args:
        take: returns the end of a step from given parameters, without what these were moved by; None where it takes
            another course from there.
        parameters: those before the step.
        before: the beginning.
        unit: the relative error of one rounding.
    """
    found: dict[Kind, float] = {}
    expected = take(parameters)
    for moved in _moved(parameters, unit) if expected is not None else ():
        end = take(moved)
        if end is not None and expected is not None:
            for kind, each in distances(expected, end, before, unit).items():
                found[kind] = max(found.get(kind, 0.0), each)
    return found


def moved(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """Return a tensor that is one rounding error away in each entry, in random directions."""
    signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    size = tensor.abs().clamp_min(tensor.square().mean().sqrt())
    return torch.addcmul(tensor, signs, size, value=unit)


def _moved(parameters: Sequence[Tensor], unit: float) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_MOVES):
        yield [moved(each, unit, generator) for each in parameters]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _distance(ends: Sequence[Tensor], others: Sequence[Tensor], before: Sequence[Tensor], unit: float) -> float:
    if not all(each.is_floating_point() or each.is_complex() for each in ends):
        exact = [(x, y) for x, y in zip(ends, others, strict=True) if not (x.is_floating_point() or x.is_complex())]
        if not all(torch.equal(x, y) for x, y in exact):
            return float("inf")
    x, y, z = (_vector(each) for each in (ends, others, before))
    is_finite = x.isfinite()
    if not torch.equal(is_finite, y.isfinite()):
        return float("inf")
    x, y, z = (torch.where(is_finite, each, 0.0) for each in (x, y, z))
    apart, way, size = ((each).norm().item() for each in (x - y, x - torch.where(z.isfinite(), z, 0.0), x))
    rounding = 4 * unit * size
    return 0.0 if apart <= rounding else apart / (way + rounding)


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    flat = [each.detach().reshape(-1) for each in tensors if each.is_floating_point() or each.is_complex()]
    whole = [torch.view_as_real(each).reshape(-1) if each.is_complex() else each for each in flat]
    return torch.cat([each.double() for each in whole]) if whole else torch.zeros(1, dtype=torch.float64)
