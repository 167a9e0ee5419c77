"""Conjugate gradient on the normal equations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlotool.hypergradient.solvers.base import NOT_FINITE, AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.solvers.progress import (
    Number,
    begin_system,
    check_krylov,
    divided,
    filled,
    is_finite,
    larger,
    negated,
    relative,
    root,
    where,
)
from mlotool.hypergradient.vector import add, choose, scaled
from mlotool.problem.interface import LowerView, Vector


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

    max_iterations: int = 10
    tolerance: float = 1e-6
    damping: float = 0.0
    is_traceable: ClassVar[bool] = True
    uses_start: ClassVar[bool] = True
    failures: ClassVar[Mapping[Status, str]] = {
        Status.SINGULAR: (
            "The vector whose residual is least is used; it has no part along what H annuls. Raise damping where that "
            "part matters."
        ),
        **NOT_FINITE,
    }

    def __post_init__(self) -> None:
        check_krylov(self, self.max_iterations, self.tolerance, self.damping)

    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, view: LowerView | None = None
    ) -> SolveResult:
        """Return the solution, or the best vector so far with the reason."""
        system = begin_system(self, self.tolerance, self.damping, matvec, vector, start=start, view=view)
        if isinstance(system, SolveResult):
            return system
        matvec, progress, nothing, num_tasks = system.matvec, system.progress, system.nothing, tasks_of(view)
        size, eps, target = system.size, system.eps, system.target
        solution, residual, error, num_products = system.solution, system.residual, system.squared, system.num_products

        def squared(a: Vector) -> Number:
            return system.inner(a, a)

        direction = nothing
        steepness, largest = filled(1.0, num_tasks), filled(0.0, num_tasks)
        for _ in range(self.max_iterations):
            if not progress.is_running:
                break
            # s = A r is minus the gradient of half the squared residual.
            slope = list(matvec(choose(progress.running, residual, nothing)))
            num_products = num_products + progress.one
            previous, steepness = steepness, squared(slope)
            progress.end(negated(is_finite(steepness)), Status.NON_FINITE)
            # A residual that A nearly annuls is in its null space: what is left cannot be removed.
            largest = larger(largest, divided(steepness, error))
            progress.end(steepness <= eps**1.5 * largest * error, Status.SINGULAR)
            if not progress.is_running:
                break
            direction = choose(progress.running, add(slope, scaled(direction, divided(steepness, previous))), nothing)
            product = matvec(direction)
            num_products = num_products + progress.one
            growth = squared(product)
            progress.end(negated(is_finite(growth)), Status.NON_FINITE)
            largest = larger(largest, divided(growth, squared(direction)))
            progress.end(growth == 0, Status.SINGULAR)
            if not progress.is_running:
                break
            step = where(progress.running, divided(steepness, growth), 0.0)
            # An ended system's product may be NaN, which zero does not remove.
            product = choose(progress.running, product, nothing)
            solution = add(solution, direction, step)
            residual = add(residual, product, -step)
            error = squared(residual)
            progress.end(error <= target, Status.CONVERGED)
        return progress.result(solution, num_products, root(relative(error, size)))
