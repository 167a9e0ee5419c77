"""Whether two ways to take a step agree but for rounding, which is measured where it is more than usual."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mlotool.core.unchanged import ROUNDING, ROUNDING_POWER, VALUE_ROUNDINGS, is_rounded, is_same

# By chance a move may change little.
NUM_MOVES = 3

# A problem, and what of it: its parameters, its buffers, or what its optimizer keeps under one name.
Kind = tuple[str, str]

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
        if not all(map(is_same, ends, actual[kind]))
    }


class Rounding:
    """How far rounding may take two ends of the steps of one program apart, in the measure of `distances`."""

    def __init__(self) -> None:
        # The most that one rounding error of the parameters has changed so far.
        self._measured: dict[Kind, float] = {}

    def limit(self, kind: Kind, unit: float) -> float:
        """Return how far apart ends of a kind may be, where `unit` is the relative error of one rounding."""
        return max(unit**ROUNDING_POWER, ROUNDING * self._measured.get(kind, 0.0))

    def beyond(self, apart: Mapping[Kind, float], unit: float) -> dict[Kind, float]:
        """Return those distances that are more than rounding."""
        return {kind: distance for kind, distance in apart.items() if not distance <= self.limit(kind, unit)}

    def measure(
        self,
        take: Callable[[Sequence[Tensor]], Values | None],
        parameters: Sequence[Tensor],
        before: Values,
        unit: float,
    ) -> None:
        """Take down what moving the parameters by one rounding error changes of a step.

        Far more than one rounding error where large terms cancel, and in finite differences.

        Args:
            take: returns the end of a step from given parameters, without what these were moved by; None where it
                takes another course from there.
            parameters: those before the step.
            before: the beginning.
            unit: the relative error of one rounding.
        """
        generator = torch.Generator().manual_seed(0)
        expected = take(parameters)
        for _ in range(0 if expected is None else NUM_MOVES):
            end = take([moved(parameter, unit, generator) for parameter in parameters])
            if end is not None and expected is not None:
                for kind, distance in distances(expected, end, before, unit).items():
                    self._measured[kind] = max(distance, self._measured.get(kind, 0.0))


def moved(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """Return a tensor that is one rounding error away in each entry, in random directions."""
    signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    size = tensor.abs().clamp_min(tensor.square().mean().sqrt())
    return torch.addcmul(tensor, signs, size, value=unit)


def _distance(ends: Sequence[Tensor], others: Sequence[Tensor], before: Sequence[Tensor], unit: float) -> float:
    if not all(torch.equal(a, b) for a, b in zip(ends, others, strict=True) if not is_rounded(a)):
        return float("inf")
    x, y, z = (_vector(tensors) for tensors in (ends, others, before))
    is_finite = x.isfinite()
    if not torch.equal(is_finite, y.isfinite()):
        return float("inf")
    x, y, z = (torch.where(is_finite, vector, 0.0) for vector in (x, y, z))
    apart, way, size = (vector.norm().item() for vector in (x - y, x - torch.where(z.isfinite(), z, 0.0), x))
    rounding = VALUE_ROUNDINGS * unit * size
    if apart <= rounding:
        return 0.0
    return apart / (way + rounding) if way + rounding > 0 else float("inf")


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    parts = [tensor.detach() for tensor in tensors if is_rounded(tensor)]
    flat = [(torch.view_as_real(part) if part.is_complex() else part).reshape(-1).double() for part in parts]
    return torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)
