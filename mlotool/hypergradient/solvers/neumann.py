"""The truncated Neumann series."""

from dataclasses import dataclass

from mlotool.core.settings import Positive, Rounds, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import add, dot, scaled


@target("solver")
@dataclass(frozen=True)
class Neumann(AbstractSolver):
    """A truncated Neumann series.

        q = a * sum over k < num_terms of (I - a H)^k v,   a = step_size

    The series converges to `H^-1 v` for a positive definite H and `0 < a < 2 / lambda_max(H)`; the error is `(I - a
    H)^num_terms H^-1 v`. `num_terms=1` is `Identity(step_size)`. With the learning rate of the lower problem for `a`,
    the series is the gradient through the last num_terms SGD steps.

    Args:
        num_terms: number of terms of the series.
        step_size: `a`; usually the learning rate of the lower problem.

    If the last term is longer than the first, more terms lead away from `H^-1 v`. The result's status then tells, and a
    run warns, that the step size is too large, or that the curvature is negative (from twice the length on). The series
    is still returned.

    Cost: `num_terms - 1` Hessian-vector products; memory of three vectors of the parameters' size.

    Source: Lorraine et al. 2020 (arXiv 1911.02590), equation 8.

    Example:
        >>> import torch
        >>> Neumann(num_terms=60, step_size=0.5).solve(lambda u: [2.0 * u[0]], [torch.ones(1)]).solution
        [tensor([0.5000])]
    """

    num_terms: Rounds = 5
    step_size: Positive = 0.1
    is_traceable = True
    is_polynomial = True
    failures = base.with_not_finite(
        DIVERGED="The truncated series is used. Lower step_size below 2 / (largest eigenvalue of H).",
        NEGATIVE_CURVATURE=(
            "The terms grow in that direction for any step_size; the truncated series is used. Lower num_terms, or use "
            "hypergradient=normal_cg."
        ),
        NON_FINITE=f"NaN is returned. Lower step_size. {base.OVERFLOW}",
    )

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the truncated series."""
        # The terms themselves, not Horner's scheme: the last one tells whether they shrink.
        # A product has the fewest vectors beside it: its own term, and the sum of those before that one.
        earlier: Vector | None = None
        before = term = vector
        for _ in range(1, self.num_terms):
            before = term
            product = matvec(term)
            earlier = term if earlier is None else add(earlier, term)
            term = add(term, product, -self.step_size)
            del product
        total = term if earlier is None else add(earlier, term)
        del earlier
        num_tasks = base.tasks_of(view)
        progress = base.Progress(num_tasks, Status.FIXED)
        if self.num_terms > 1:
            first, last, whole = base.norms((vector, term, total), num_tasks)
            progress.end_not_finite(first, Status.NON_FINITE_VECTOR)
            progress.end_not_finite(whole + last)
            base.end_growing(progress, first, last, base.measured(dot(before, term, num_tasks)))
        return progress.result(scaled(total, self.step_size), self.num_terms - 1)
