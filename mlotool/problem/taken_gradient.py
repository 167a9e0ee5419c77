"""Whether a step whose gradient is computed again is the step that was taken: looked at for some unrolls.

A loss that counts its calls, or draws from numpy or from a generator of its own, has another gradient the second time.
The pullback would then be that of steps that nobody has taken, and nothing else would say so.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.gradient import dense
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import fingerprint, tolerance

_CHANGED = (
    "problems.{problem}.loss: found another gradient, by {error:.2g} of its size, when a step was computed again; "
    "expected the same function each time, since Unrolled takes steps again in its backward pass. Draw random numbers "
    "from torch's default generators alone (no random, no numpy, no generator= of your own), and let the loss keep "
    "nothing from call to call: what changes belongs into a buffer of the module, or into the batch. Buffers of other "
    "problems' modules that the loss reads (a teacher with BatchNorm that trains beside) are today's, too: let such a "
    "module be in train mode there, or have none that move. Or keep the graphs of the steps: hypergradient.remat=false."
)


class LargestNorm:
    """The largest norm of the gradients of a problem that have been compared.

    Once a problem has converged its gradients are rounding alone, and none is like the other. They are small beside
    those that led there.

    Attributes:
        value: zero at first.
    """

    def __init__(self) -> None:
        self.value = 0.0


class TakenGradient:
    """The gradient of a step, in two numbers a parameter.

    Args:
        gradient: over batches and ranks, before it is clipped; None of an unused parameter.
        largest: of the problem; comparisons raise it.

    Example:
        >>> taken = TakenGradient([torch.ones(2), None])
        >>> taken.compare([torch.ones(2), None], "w")  # nothing to refuse
    """

    def __init__(self, gradient: Sequence[Tensor | None], largest: LargestNorm | None = None) -> None:
        self._numbers: Tensor | None = _numbers(gradient)
        self._largest = largest or LargestNorm()

    @classmethod
    def of(
        cls, gradient: Sequence[Tensor | None] | None, num_unrolls: int, largest: LargestNorm
    ) -> "TakenGradient | None":
        """Return it where an unroll is looked at: the first one, the second, the fourth and so on; else None.

        Args:
            gradient: as above; None where it is not known.
            num_unrolls: that there were before.
            largest: of the problem.
        """
        if gradient is None or num_unrolls & (num_unrolls + 1) or is_tracing():
            return None
        return cls(gradient, largest)

    @property
    def is_open(self) -> bool:
        """Whether there has been no comparison yet."""
        return self._numbers is not None

    def compare(self, gradient: Sequence[Tensor | None], problem: str, precision: str = "fp32") -> None:
        """Refuse another gradient, at the first call.

        Later the problem above may have stepped, and a gradient that someone asks for is at its new parameters.

        Args:
            gradient: of the same step, computed again.
            problem: its name.
            precision: of its loss.

        Raises:
            ConfigError: it is another one, by more than rounding.
        """
        before, self._numbers = self._numbers, None
        if before is None or is_tracing():
            return
        now = _numbers(gradient)
        # A bias before a BatchNorm has a gradient of rounding alone: what counts is the size of the whole.
        size = max(math.hypot(*[norm for _, norm in numbers]) for numbers in (before.tolist(), now.tolist()))
        largest = self._largest.value = max(size, self._largest.value)
        errors = (before - now).abs().amax(1).tolist()
        for error, slope in zip(errors, gradient, strict=True):
            dtype = torch.bfloat16 if precision != "fp32" or slope is None else slope.dtype
            # What has overflowed is no sign of anything.
            if error > tolerance(dtype) * largest:
                raise ConfigError(_CHANGED.format(problem=problem, error=error / size))


def _numbers(gradient: Sequence[Tensor | None]) -> Tensor:
    """Return the fingerprints as rows; zeros of what is unused."""
    device = next((each.device for each in gradient if each is not None), None)
    nothing = torch.zeros(2, dtype=torch.float64, device=device)
    rows = [nothing if each is None else fingerprint(each) for each in dense(gradient)]
    return torch.stack(rows)
