"""Conjugate gradient."""

import math
from dataclasses import dataclass

import numpy

from mlotool.core.settings import Count, NonNegative, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import add, choose, scaled

_RETURNED = "The iterate before is used, or {else_} if there was none."
_ITSELF = _RETURNED.format(else_="v itself (as by Identity)")
_ALONG = _RETURNED.format(else_="v over the size of its own curvature")


@target("solver")
@dataclass(frozen=True)
class ConjugateGradient(AbstractSolver):
    """The conjugate gradient method (CG), for a positive definite matrix.

        (H + damping I) q = v

    A solve stops at `norm(r) <= tolerance * norm(v)` for the residual r, after `max_iterations`, or at a direction
    whose curvature is negative or zero. In the last case, of which the result's status tells and a run warns, the
    iterate before is returned (Steihaug 1983); if its residual exceeds `norm(v)`, the iterate with the smallest
    residual.

    If the very first direction, v, has negative curvature, there is no earlier iterate, and `v (v'v / |v'Hv|)` is
    returned: it scales with H as `H^-1 v` does. On random indefinite quadratics its norm was within a factor of 2 to 10
    of that of `|H|^-1 v`, at every scale of H. If the curvature of v is zero, v itself is returned, as by `Identity`.

    Args:
        max_iterations: the most iterations of a solve.
        tolerance: relative residual at which a solve stops; 0 takes all iterations, unless rounding ends them.
        damping: number that is added to the diagonal of H.

    Cost: one Hessian-vector product per iteration, and one more for a warm start; memory of four vectors of the
    parameters' size.

    Source: Hestenes and Stiefel 1952; Rajeswaran et al. 2019, iMAML (arXiv 1909.04630).

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
    """Conjugate gradient on the normal equations (CGLS, CGNR), for an indefinite matrix.

        minimize norm(A q - v) over q,   A = H + damping I,   by conjugate gradient on A^2 q = A v

    This also solves systems with an indefinite H, whose negative curvature stops plain conjugate gradient, and the
    residual never grows. It converges more slowly: the condition number is squared. For a singular A it returns a
    least-squares solution; the result's status tells, and a run warns.

    Args:
        max_iterations: the most iterations of a solve.
        tolerance: relative residual `norm(A q - v) / norm(v)` at which a solve stops; 0 takes all iterations.
        damping: number that is added to the diagonal of H. It shifts all eigenvalues, and may move a negative one to
            zero.

    Cost: two Hessian-vector products per iteration, and one more for a warm start; memory of four vectors of the
    parameters' size.

    Source: Hestenes and Stiefel 1952, section 10; Grazzi et al. 2020 (arXiv 2006.16218) propose it for hypergradients.

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
            "The vector with the smallest residual is used; it has no part in the null space of H. Raise damping if "
            "that part matters."
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
