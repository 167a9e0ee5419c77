"""The dense solve: the oracle."""

import math
from dataclasses import dataclass

import torch

from mlotool.core.arguments import require
from mlotool.core.settings import Count, NonNegative, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import flatten, unflatten


@target("solver")
@dataclass(frozen=True)
class Exact(AbstractSolver):
    """Builds the matrix `H + damping I` column by column, and solves with it by LU factorization.

        q = (H + damping I)^-1 v

    If the matrix is singular up to rounding, the least-squares solution of least norm is returned; the result's status
    tells, and a run warns.

    Args:
        damping: number that is added to the diagonal of H.
        max_parameters: the most parameters of a problem (with `tasks`, of a task); the matrix has the square of this
            number of entries. A problem with more is an error.

    Cost: p Hessian-vector products and p^2 numbers of memory for p parameters; for n tasks of p parameters each, p
    products and n p^2 numbers.

    Example:
        >>> import torch
        >>> Exact().solve(lambda u: [2.0 * u[0]], [torch.ones(2)]).solution
        [tensor([0.5000, 0.5000])]
    """

    damping: NonNegative = 0.0
    max_parameters: Count = 5000

    failures = base.with_not_finite(
        SINGULAR=(
            "The least-squares solution of least norm is used: it has no part in the null space of H. Raise damping if "
            "that part matters."
        ),
    )

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the solution up to rounding."""
        num_tasks = base.tasks_of(view)
        rows = flatten(vector, num_tasks)
        size = rows.shape[1]
        expected = f"at most {self.max_parameters}, as the solver builds a matrix of their square"
        advice = "Use hypergradient=cg, or raise hypergradient.solver.max_parameters."
        require(size <= self.max_parameters, "Exact: parameters of a problem or task", size, expected, advice)
        identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
        # A product with the same basis vector in each task gives a column of each one's matrix.
        columns = [
            flatten(matvec(unflatten(row.expand_as(rows), vector, num_tasks)), num_tasks) for row in identity.unbind()
        ]
        matrix = torch.stack(columns, 1)
        matrix = 0.5 * (matrix + matrix.mT) + self.damping * identity
        progress = base.Progress(num_tasks, Status.CONVERGED)
        has_numbers = rows.isfinite().all(1)
        is_finite = matrix.isfinite().all(2).all(1) & has_numbers
        progress.end_rows(~has_numbers, Status.NON_FINITE_VECTOR)
        progress.end_rows(~is_finite, Status.NON_FINITE)
        matrix = torch.where(is_finite[:, None, None], matrix, identity)
        rows = torch.where(is_finite[:, None], rows, 0.0)
        # Relative to the largest eigenvalue; an inverse would make rounding of what is below.
        values = torch.linalg.eigvalsh(matrix).abs()
        is_singular = values.amin(1) <= size * torch.finfo(rows.dtype).eps * values.amax(1)
        progress.end_rows(is_singular, Status.SINGULAR)
        solution = torch.linalg.solve_ex(matrix, rows[..., None])[0]
        for index in is_singular.nonzero().flatten().tolist():
            solution[index] = torch.linalg.pinv(matrix[index], hermitian=True) @ rows[index, :, None]
        lengths = torch.linalg.vector_norm(rows, dim=1).clamp_min(torch.finfo(rows.dtype).tiny)
        residuals = torch.linalg.vector_norm((matrix @ solution)[..., 0] - rows, dim=1) / lengths
        residuals = torch.where(is_finite, residuals, math.nan)
        known_residuals = float(residuals[0]) if num_tasks is None else residuals
        return progress.result(unflatten(solution[..., 0], vector, num_tasks), size, known_residuals)
