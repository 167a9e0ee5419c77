"""Conjugate gradient."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.solvers.progress import Progress, begin, measured, relative
from mlotool.hypergradient.vector import add, choose, dot, scaled, zeros
from mlotool.program.differentiation import LowerLoss, Vector


@dataclass
class ConjugateGradient(AbstractSolver):
    """Solves `(H + damping I) q = v` by conjugate gradient (Hestenes & Stiefel 1952; iMAML, arXiv 1909.04630).

    Stops at `norm(r) <= tolerance * norm(v)`, after `max_iterations`, or where it breaks down: at a direction of
    negative curvature, a non-finite product or a singular H it returns the best vector so far and says so.

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

    max_iterations: int = 10
    tolerance: float = 1e-6
    damping: float = 0.0
    uses_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole = isinstance(self.max_iterations, int) and self.max_iterations >= 1
        if not whole or not self.tolerance >= 0 or not self.damping >= 0:
            raise ConfigError(
                f"ConjugateGradient: found max_iterations={self.max_iterations}, tolerance={self.tolerance}, "
                f"damping={self.damping}; expected a whole max_iterations >= 1, tolerance >= 0 and damping >= 0. "
                "Correct hypergradient.solver."
            )

    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, lower_loss: LowerLoss | None = None
    ) -> SolveResult:
        """Return the solution, or the best vector so far with the reason."""
        num_tasks = tasks_of(lower_loss)

        def damped(direction: Vector) -> Vector:
            product = matvec(direction)
            return add(product, direction, self.damping) if self.damping else product

        def inner(a: Vector, b: Vector) -> Tensor:
            return measured(dot(a, b, num_tasks))

        progress, nothing = Progress(num_tasks), zeros(vector)
        size = inner(vector, vector)
        progress.end(~size.isfinite(), Status.NON_FINITE)
        progress.end(size == 0, Status.CONVERGED)
        if not progress.is_running:
            return progress.result(nothing, 0, relative(size, size))
        vector = choose(progress.running, vector, nothing)
        solution, residual, is_warm, num_products = begin(damped, vector, start, num_tasks)
        squared = inner(residual, residual)
        # Below eps nothing but rounding is left, and a further step would divide by it.
        eps = torch.finfo(vector[0].dtype).eps
        target = max(self.tolerance, eps) ** 2 * size
        progress.end(squared <= target, Status.CONVERGED)
        direction = choose(progress.running, residual, nothing)
        best, smallest, has_failed = solution, squared, torch.zeros_like(progress.running)
        for number in range(self.max_iterations):
            if not progress.is_running:
                break
            product = damped(direction)
            num_products += 1
            curvature = inner(direction, product)
            progress.end(~curvature.isfinite(), Status.NON_FINITE)
            is_negative = progress.end(curvature <= 0, Status.NEGATIVE_CURVATURE)
            is_first = is_negative & ~is_warm & (number == 0)
            has_failed = has_failed | (is_negative & ~is_first)
            if bool(is_first.any()):
                # The first direction is v itself: the step of the identity, the best there is without curvature.
                solution = choose(is_first, vector, solution)
                residual = choose(is_first, add(residual, product, -1.0), residual)
                squared = inner(residual, residual)
            if not progress.is_running:
                break
            step = torch.where(progress.running, squared / curvature, 0.0)
            # An ended system's product may be NaN, which zero does not remove.
            product = choose(progress.running, product, nothing)
            solution = add(solution, direction, step)
            residual = add(residual, product, -step)
            previous, squared = squared, inner(residual, residual)
            progress.end(squared <= target, Status.CONVERGED)
            # It grows by the root of the condition number at most: more, and v has a part that H annuls.
            has_failed = has_failed | progress.end(squared > size / eps, Status.SINGULAR)
            is_better = squared < smallest
            best, smallest = choose(is_better, solution, best), torch.where(is_better, squared, smallest)
            direction = choose(progress.running, add(residual, scaled(direction, squared / previous)), nothing)
        # Before it breaks down at a nearly singular H it may have left for far away.
        is_lost = has_failed & (squared > size)
        if bool(is_lost.any()):
            solution = choose(is_lost, best, solution)
            # Measured again: the recursion has drifted from the truth on the way.
            squared = torch.where(is_lost, inner(*[add(vector, damped(solution), -1.0)] * 2), squared)
            num_products += 1
        return progress.result(solution, num_products, relative(squared, size).sqrt())
