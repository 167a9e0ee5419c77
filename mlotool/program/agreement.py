"""Whether two ways to take steps, or two evaluations, agree but for rounding: what each comparison may differ by.

The rounding of steps is measured where it is more than usual.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

EVALUATIONS = 1e-3
"""Between two evaluations of a loss, or gradients of it, relative: kernels on a GPU add in another order each time."""

SAME = 0.75
"""Power of a rounding error up to which two gradients count as the same."""

ROUNDING = 32.0
"""Of what moving the parameters by one rounding error changes, how much another order of sums may."""

NUM_MOVES = 3
"""By chance a move may change little."""

Kind = tuple[str, str]
"""A problem, and what of it: its parameters, its buffers, or what its optimizer keeps under one name."""

Values = Mapping[Kind, Sequence[Tensor]]


def distances(expected: Values, actual: Values, before: Values, unit: float) -> dict[Kind, float]:
    """Return how far two ends of a step are apart, relative to how far the first one is from its beginning.

    What rounding of the values themselves accounts for counts as nothing, and so do entries that are not finite in
    both.

    Args:
        expected: the end by the plans.
        actual: the end by another way.
        before: the beginning; of what has none (a loss), 0.
        unit: the relative error of one rounding.

    Returns:
        By kind; infinite where one of both is not finite, or where numbers that are counted are others.
    """
    return {
        kind: _distance(ends, actual[kind], before.get(kind) or [*map(torch.zeros_like, ends)], unit)
        for kind, ends in expected.items()
        if not all(map(_is_same, ends, actual[kind]))
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
    largest: dict[Kind, float] = {}
    generator = torch.Generator().manual_seed(0)
    expected = take(parameters)
    for _ in range(0 if expected is None else NUM_MOVES):
        end = take([moved(parameter, unit, generator) for parameter in parameters])
        if end is not None and expected is not None:
            for kind, distance in distances(expected, end, before, unit).items():
                largest[kind] = max(largest.get(kind, 0.0), distance)
    return largest


def moved(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """Return a tensor that is one rounding error away in each entry, in random directions."""
    signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    size = tensor.abs().clamp_min(tensor.square().mean().sqrt())
    return torch.addcmul(tensor, signs, size, value=unit)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _distance(ends: Sequence[Tensor], others: Sequence[Tensor], before: Sequence[Tensor], unit: float) -> float:
    if not all(torch.equal(a, b) for a, b in zip(ends, others, strict=True) if not _is_inexact(a)):
        return float("inf")
    x, y, z = (_vector(tensors) for tensors in (ends, others, before))
    is_finite = x.isfinite()
    if not torch.equal(is_finite, y.isfinite()):
        return float("inf")
    x, y, z = (torch.where(is_finite, vector, 0.0) for vector in (x, y, z))
    apart, way, size = (vector.norm().item() for vector in (x - y, x - torch.where(z.isfinite(), z, 0.0), x))
    rounding = 4 * unit * size
    if apart <= rounding:
        return 0.0
    return apart / (way + rounding) if way + rounding > 0 else float("inf")


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    parts = [tensor.detach() for tensor in tensors if _is_inexact(tensor)]
    flat = [(torch.view_as_real(part) if part.is_complex() else part).reshape(-1).double() for part in parts]
    return torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)
