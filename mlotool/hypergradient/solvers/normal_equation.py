"""Conjugate gradient on the normal equations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy

from mlotool.core.settings import Count, NonNegative, target
from mlotool.hypergradient.solvers.base import NOT_FINITE, AbstractSolver, Matvec, SolveResult, Status
from mlotool.hypergradient.solvers.systems import LinearSystem, where
from mlotool.hypergradient.vector import add, scaled
from mlotool.problem.interface import LowerView, Vector


@target("solver")
@dataclass(frozen=True)
class NormalEquationConjugateGradient(AbstractSolver):
    """Minimises `norm(A q - v)` for `A = H + damping I` by conjugate gradient on `A^2 q = A v` (CGLS, CGNR).

    Right for an indefinite H, whose curvature stops plain conjugate gradient; the residual never grows. The
    convergence is that of the condition number squared. For a singular A it ends with a least-squares solution, and a
    status that says so.

    Args:
        max_iterations: of each solve.
        tolerance: relative residual `norm(A q - v) / norm(v)`; 0 uses all iterations.
        damping: added to the diagonal of H; it shifts the spectrum, and may move an eigenvalue to zero.

    Cost: two products an iteration, and one for a start; four vectors of memory.

    Source: Hestenes & Stiefel 1952, section 10; Grazzi et al. 2020 (arXiv 2006.16218) name it in this place.

    Example:
        >>> import torch
        >>> solver = NormalEquationConjugateGradient(4, 1e-6)
        >>> solver.solve(lambda u: [torch.tensor([2.0, -4.0]) * u[0]], [torch.ones(2)]).solution
        [tensor([ 0.5000, -0.2500])]
    """

    max_iterations: Count = 10
    tolerance: NonNegative = 1e-6
    damping: NonNegative = 0.0
    is_traceable: ClassVar[bool] = True
    uses_start: ClassVar[bool] = True
    failures: ClassVar[Mapping[Status, str]] = {
        Status.SINGULAR: (
            "The vector whose residual is least is used; it has no part along what H annuls. Raise damping where that "
            "part matters."
        ),
        **NOT_FINITE,
    }

    @numpy.errstate(all="ignore")
    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, view: LowerView | None = None
    ) -> SolveResult:
        """Return the solution, or the best vector so far with the reason."""
        system = LinearSystem(self.tolerance, self.damping, matvec, vector, start, view)
        progress, inner, eps = system.progress, system.inner, system.eps
        solution, residual, error = system.solution, system.residual, system.squared
        direction, steepness, largest = system.nothing, 1.0, 0.0
        for _ in range(self.max_iterations):
            if not progress.is_running:
                break
            # s = A r is minus the gradient of half the squared residual.
            slope = system.product(system.of_running(residual))
            previous, steepness = steepness, inner(slope, slope)
            progress.end_not_finite(steepness)
            # A residual that A nearly annuls is in its null space: what is left cannot be removed.
            largest = where(largest > steepness / error, largest, steepness / error)
            progress.end(steepness <= eps**1.5 * largest * error, Status.SINGULAR)
            if not progress.is_running:
                break
            direction = system.of_running(add(slope, scaled(direction, steepness / previous)))
            product = system.product(direction)
            growth = inner(product, product)
            progress.end_not_finite(growth)
            ratio = growth / inner(direction, direction)
            largest = where(largest > ratio, largest, ratio)
            progress.end(growth == 0, Status.SINGULAR)
            step = where(progress.running, steepness / growth, 0.0)
            # An ended system's product may be NaN, which a step of zero does not remove.
            product = system.of_running(product)
            solution = add(solution, direction, step)
            residual = add(residual, product, -step)
            error = inner(residual, residual)
            progress.end(error <= system.target, Status.CONVERGED)
        return system.result(solution, error)
