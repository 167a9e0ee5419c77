"""Conjugate gradient."""

import math
from dataclasses import dataclass

import numpy

from mlotool.core.settings import Count, NonNegative, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import add, choose, scaled

_RETURNED = "An iterate before is used, or {else_} where there was none."
_ITSELF = _RETURNED.format(else_="v itself (as by Identity)")
_ALONG = _RETURNED.format(else_="v over the size of its own curvature")


@target("solver")
@dataclass(frozen=True)
class ConjugateGradient(AbstractSolver):
    """Solves `(H + damping I) q = v` by conjugate gradient (Hestenes & Stiefel 1952; iMAML, arXiv 1909.04630).

    Stops at `norm(r) <= tolerance * norm(v)`, after `max_iterations`, or where it breaks down: at a direction of
    negative curvature, or one of none (a singular H). Then it returns the iterate before (Steihaug 1983), or, where
    that one's residual exceeds `norm(v)`, the iterate of the least residual. The status says so, and the result is not
    zero.

    Where the first direction, v, breaks down and there was no start, there is no iterate before. At negative curvature
    `v (v'v / |v'Hv|)` is returned: like `H^-1 v`, it is 1/c times as long for c times H. Its norm was 2 to 10 times off
    that of `|H|^-1 v` on random indefinite quadratics at every scale of H, where that of v was off by as much as the
    scale; on small networks it was a hundred times nearer than v. Without a curvature to go by, v
    itself is returned, as by Identity.

    Args:
        max_iterations: of each solve.
        tolerance: relative residual; 0 uses all iterations, or stops where the residual is exhausted.
        damping: added to the diagonal of H.

    Cost: one product an iteration, and one for a start; four vectors of memory.

    Example:
        >>> import torch
        >>> ConjugateGradient(3, 1e-6).solve(lambda u: [torch.tensor([2.0, 4.0]) * u[0]], [torch.ones(2)]).solution
        [tensor([0.5000, 0.2500])]
    """

    max_iterations: Count = 10
    tolerance: NonNegative = 1e-6
    damping: NonNegative = 0.0
    is_traceable = True
    uses_start = True
    failures = base.with_not_finite(
        NEGATIVE_CURVATURE=f"{_ALONG} Raise damping, or use hypergradient=normal_cg.",
        SINGULAR=f"{_ITSELF} Raise damping, or lower max_iterations.",
    )

    @numpy.errstate(all="ignore")
    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the solution, or the best vector so far with the reason."""
        system = base.LinearSystem(self, matvec, vector, start, view)
        progress, inner, size, eps = system.progress, system.inner, system.size, system.eps
        solution, residual, squared = system.solution, system.residual, system.squared
        direction = system.of_running(residual)
        length, largest = squared, 0.0
        # Zero is no solution to fall back to: a hypergradient of exactly zero looks like one that has converged.
        best, smallest, has_failed = solution, base.where(system.is_cold, math.inf, squared), False
        for number in range(self.max_iterations):
            if not progress.is_running:
                break
            product = system.product(direction)
            curvature = inner(direction, product)
            ratio = abs(curvature) / length
            largest = base.where(largest > ratio, largest, ratio)
            has_ended = progress.end_not_finite(curvature)
            # Below eps it is rounding, whatever its sign.
            has_ended = has_ended | progress.end(abs(curvature) <= eps * length * largest, Status.SINGULAR)
            has_ended = has_ended | progress.end(curvature < 0, Status.NEGATIVE_CURVATURE)
            step, moves = squared / curvature, progress.running
            if number == 0:
                # Without an iterate before, the step that the size of its curvature allows, which has the scale of H.
                is_first = has_ended & system.is_cold
                step = base.where(is_first, base.where(curvature < 0, abs(step), 1.0), step)
                moves, has_ended = moves | is_first, base.where(is_first, False, has_ended)
            has_failed = has_failed | has_ended
            step = base.where(moves, step, 0.0)
            # An ended system's product may be NaN, which a step of zero does not remove.
            product = choose(moves, product, system.nothing)
            solution = add(solution, direction, step)
            residual = add(residual, product, -step)
            previous, squared = squared, inner(residual, residual)
            progress.end(squared <= system.target, Status.CONVERGED)
            # It grows by the root of the condition number at most: more, and v has a part that H annuls.
            has_failed = has_failed | progress.end(squared > size / eps, Status.SINGULAR)
            is_better = squared < smallest
            best, smallest = choose(is_better, solution, best), base.where(is_better, squared, smallest)
            ratio = squared / previous
            direction = system.of_running(add(residual, direction, ratio))
            # The residual is orthogonal to the direction before.
            length = squared + ratio * ratio * length
        # Along a small curvature it may have left for far away.
        is_lost = has_failed & (squared > size)
        if base.may_hold(is_lost):
            solution = choose(is_lost, best, solution)
            # Measured again: the recursion has drifted from the truth on the way.
            residual = add(system.vector, system.product(solution, is_lost), -1.0)
            squared = base.where(is_lost, inner(residual, residual), squared)
        return system.result(solution, squared)


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
    is_traceable = True
    uses_start = True
    failures = base.with_not_finite(
        SINGULAR=(
            "The vector whose residual is least is used; it has no part along what H annuls. Raise damping where that "
            "part matters."
        ),
    )

    @numpy.errstate(all="ignore")
    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the solution, or the best vector so far with the reason."""
        system = base.LinearSystem(self, matvec, vector, start, view)
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
            largest = base.where(largest > steepness / error, largest, steepness / error)
            progress.end(steepness <= eps**1.5 * largest * error, Status.SINGULAR)
            if not progress.is_running:
                break
            direction = system.of_running(add(slope, scaled(direction, steepness / previous)))
            product = system.product(direction)
            growth = inner(product, product)
            progress.end_not_finite(growth)
            ratio = growth / inner(direction, direction)
            largest = base.where(largest > ratio, largest, ratio)
            progress.end(growth == 0, Status.SINGULAR)
            step = base.where(progress.running, steepness / growth, 0.0)
            # An ended system's product may be NaN, which a step of zero does not remove.
            product = system.of_running(product)
            solution = add(solution, direction, step)
            residual = add(residual, product, -step)
            error = inner(residual, residual)
            progress.end(error <= system.target, Status.CONVERGED)
        return system.result(solution, error)
