"""Conjugate gradient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status
from mlotool.hypergradient.vector import add, dot, scaled
from mlotool.program.differentiation import Vector


@dataclass
class ConjugateGradient(AbstractSolver):
    """Solves `(H + damping I) q = v` by conjugate gradient (Hestenes & Stiefel 1952; iMAML, arXiv 1909.04630).

    Stops at `norm(r) <= tolerance * norm(v)`, after `max_iterations`, or where it breaks down: at a direction of
    negative curvature or a non-finite product it returns the best vector so far and says so.

    Args:
        max_iterations: products at most.
        tolerance: relative residual; 0 uses all iterations, or stops where the residual is exhausted.
        damping: added to the diagonal of H.

    Cost: one product an iteration; three vectors of memory.

    Example:
        >>> import torch
        >>> ConjugateGradient(3, 1e-6).solve(lambda u: [torch.tensor([2.0, 4.0]) * u[0]], [torch.ones(2)]).solution
        [tensor([0.5000, 0.2500])]
    """

    max_iterations: int = 10
    tolerance: float = 1e-6
    damping: float = 0.0

    def __post_init__(self) -> None:
        whole = isinstance(self.max_iterations, int) and self.max_iterations >= 1
        if not whole or not self.tolerance >= 0 or not self.damping >= 0:
            raise ConfigError(
                f"ConjugateGradient: found max_iterations={self.max_iterations}, tolerance={self.tolerance}, "
                f"damping={self.damping}; expected a whole max_iterations >= 1, tolerance >= 0 and damping >= 0. "
                "Correct hypergradient.solver."
            )

    def solve(self, matvec: Matvec, vector: Vector) -> SolveResult:
        """Return the solution, or the best vector so far with the reason."""
        solution = [torch.zeros_like(tensor) for tensor in vector]
        residual = direction = list(vector)
        squared = start = _value(dot(vector, vector))
        if start == 0.0:
            return SolveResult(solution, Status.CONVERGED, 0, 0.0)
        if not math.isfinite(start):
            return SolveResult(solution, Status.NON_FINITE, 0)
        # Below this nothing but rounding is left, and a further step would divide by it.
        exhausted = (torch.finfo(vector[0].dtype).eps ** 2) * start
        target = max(self.tolerance**2 * start, exhausted)
        status, num_products = Status.MAX_ITERATIONS, 0
        while num_products < self.max_iterations:
            product = list(matvec(direction))
            num_products += 1
            if self.damping:
                product = add(product, direction, self.damping)
            curvature = _value(dot(direction, product))
            if not math.isfinite(curvature):
                status = Status.NON_FINITE
                break
            if curvature <= 0.0:
                # The first direction is v itself: the step of the identity, the best there is without curvature.
                if num_products == 1:
                    solution, residual = list(vector), add(residual, product, -1.0)
                    squared = _value(dot(residual, residual))
                status = Status.NEGATIVE_CURVATURE
                break
            step = squared / curvature
            solution = add(solution, direction, step)
            residual = add(residual, product, -step)
            previous, squared = squared, _value(dot(residual, residual))
            if squared <= target:
                status = Status.CONVERGED
                break
            direction = add(residual, scaled(direction, squared / previous))
        return SolveResult(solution, status, num_products, math.sqrt(squared / start))


def _value(scalar: Tensor) -> float:
    return float(scalar)
