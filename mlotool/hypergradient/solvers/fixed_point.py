"""Fixed-point iteration."""

import math
from dataclasses import dataclass

import numpy
from torch import Tensor

from mlotool.core.settings import NonNegative, Positive, Rounds, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import add, choose, dot, norm, zeros

# Residual of a start over that of zero, beyond which the last pullbacks have led away.
_LOST = 1e3


@target("solver")
@dataclass(frozen=True)
class FixedPoint(AbstractSolver):
    """Fixed-point (Richardson) iteration.

        q <- q - a (H q - v),   a = step_size

    From zero, K iterations are the Neumann series of K terms. With `warm_start` and one iteration, this is SOBA's step
    on the linear system. SOBA computes its steps of theta, q and x at the old values of all three; here theta steps
    first, then q at the new theta, and the gradient of x uses the new q. The fixed point is the same.

    Converges for a positive definite H and `0 < a < 2 / lambda_max(H)`; each iteration multiplies the error by at most
    `norm(I - a H)`. If the residual grows, or if the residual of the start is a thousand times that of zero, the
    result's status tells, and a run warns, that the iteration diverges; the last iterate is returned.

    Args:
        num_iterations: the most iterations of a solve.
        step_size: `a`.
        tolerance: relative residual; a solve stops at `norm(H q - v) <= tolerance * norm(v)`. With 0, it takes all
            iterations and measures no residual.

    Cost: one Hessian-vector product per iteration (none for the first one from zero); memory of two vectors of the
    parameters' size.

    Source: Grazzi et al. 2020 (arXiv 2006.16218); SOBA: Dagreou et al. 2022 (arXiv 2201.13409).

    Example:
        >>> import torch
        >>> FixedPoint(60, 0.4).solve(lambda u: [2.0 * u[0]], [torch.ones(1)]).solution
        [tensor([0.5000])]
    """

    num_iterations: Rounds = 10
    step_size: Positive = 0.1
    tolerance: NonNegative = 0.0
    is_traceable = True
    is_polynomial = True
    uses_start = True
    failures = base.with_not_finite(
        DIVERGED="The last iterate is used. Lower step_size below 2 / (largest eigenvalue of H).",
        NEGATIVE_CURVATURE=(
            "The iteration diverges in that direction for any step_size; the last iterate is used. Lower "
            "num_iterations, or use hypergradient=normal_cg."
        ),
        NON_FINITE=f"NaN is returned. Lower step_size. {base.OVERFLOW}",
    )

    @numpy.errstate(all="ignore")
    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the last iterate."""
        num_tasks = base.tasks_of(view)
        progress = base.Progress(num_tasks, Status.MAX_ITERATIONS if self.tolerance else Status.FIXED)
        solution = zeros(vector) if start is None else list(start)
        first = before = residual = list(vector)
        num_products: int | Tensor = 0
        residuals: base.Number = math.nan
        size = base.measured(norm(vector, num_tasks)) if self.tolerance else 0.0
        if self.tolerance:
            progress.end_not_finite(size, Status.NON_FINITE_VECTOR)
        for number in range(self.num_iterations):
            if not progress.is_running:
                break
            if number or start is not None:
                before, residual = residual, add(vector, matvec(solution), -1.0)
                num_products = num_products + progress.count_if(progress.running)
            if number == 0:
                first = residual
            if self.tolerance:
                reached = base.measured(norm(residual, num_tasks))
                progress.end_not_finite(reached)
                has_converged = progress.end(reached <= self.tolerance * size, Status.CONVERGED)
                residuals = base.where(has_converged, base.relative(reached, size), residuals)
                if not progress.is_running:
                    break
                residual = choose(progress.running, residual, zeros(vector))
            solution = add(solution, residual, self.step_size)
        reached, of_first, of_vector, whole = base.norms((residual, first, vector, solution), num_tasks)
        progress.end_not_finite(of_vector, Status.NON_FINITE_VECTOR)
        progress.end_not_finite(whole)
        base.end_growing(progress, of_first, reached, base.measured(dot(before, residual, num_tasks)))
        # A single iteration a pullback shows no growth of its own.
        progress.end((of_first > _LOST * of_vector) & (of_vector > 0), Status.DIVERGED)
        return progress.result(solution, num_products, residuals)
