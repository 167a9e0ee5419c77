"""The dense solve: the oracle."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, NonNegative, target
from mlotool.hypergradient.solvers.base import (
    NOT_FINITE,
    AbstractSolver,
    Matvec,
    SolveResult,
    Status,
    tasks_of,
)
from mlotool.hypergradient.solvers.systems import Progress
from mlotool.hypergradient.vector import flatten, unflatten
from mlotool.problem.interface import LowerView, Vector


@target("solver")
@dataclass(frozen=True)
class Exact(AbstractSolver):
    """Builds `H + damping I` column by column and solves by LU.

    A matrix that is singular up to rounding gives the least-squares solution of least norm, with a status that says so.

    Args:
        damping: added to the diagonal.
        max_parameters: refuses problems with more (a task), since the matrix has their square.

    Cost: p products and p^2 memory for p parameters; p products and n p^2 memory for n tasks of p each.

    Example:
        >>> import torch
        >>> Exact().solve(lambda u: [2.0 * u[0]], [torch.ones(2)]).solution
        [tensor([0.5000, 0.5000])]
    """

    damping: NonNegative = 0.0
    max_parameters: Count = 5000

    failures: ClassVar[Mapping[Status, str]] = {
        Status.SINGULAR: (
            "The least-squares solution of least norm is used: it has no part along what H annuls. Raise damping where "
            "that part matters."
        ),
        **NOT_FINITE,
    }

    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, view: LowerView | None = None
    ) -> SolveResult:
        """Return the solution up to rounding."""
        num_tasks = tasks_of(view)
        rows = flatten(vector, num_tasks)
        size = rows.shape[1]
        if size > self.max_parameters:
            whose = "" if num_tasks is None else " a task"
            raise ConfigError(
                f"The Exact solver met a problem of {size} parameters{whose}, a matrix of "
                f"{size**2 * 8 / 2**30:.1f} GiB in float64; expected at most max_parameters={self.max_parameters}. "
                "Use hypergradient=cg, or raise hypergradient.solver.max_parameters."
            )
        identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
        # A product with the same basis vector in each task gives a column of each one's matrix.
        columns = [
            flatten(matvec(unflatten(row.expand_as(rows), vector, num_tasks)), num_tasks) for row in identity.unbind()
        ]
        matrix = torch.stack(columns, 1)
        matrix = 0.5 * (matrix + matrix.mT) + self.damping * identity
        progress = Progress(num_tasks, Status.CONVERGED)
        has_numbers = rows.isfinite().all(1)
        progress.end(~has_numbers.cpu().reshape(progress.shape), Status.NON_FINITE_VECTOR)
        is_finite = matrix.isfinite().all(2).all(1) & has_numbers
        progress.end(~is_finite.cpu().reshape(progress.shape), Status.NON_FINITE)
        matrix = torch.where(is_finite[:, None, None], matrix, identity)
        given = torch.where(is_finite[:, None], rows, 0.0)
        found, is_singular = _solve(matrix, given)
        progress.end(is_singular.cpu().reshape(progress.shape), Status.SINGULAR)
        for index in is_singular.nonzero().flatten().tolist():
            found[index] = torch.linalg.pinv(matrix[index], hermitian=True) @ given[index]
        residuals = torch.where(is_finite, _residuals(matrix, found, given), math.nan)
        known_residuals = float(residuals[0]) if num_tasks is None else residuals
        return progress.result(unflatten(found, vector, num_tasks), size, known_residuals)


def _solve(matrix: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return what LU finds, and by system whether the matrix is singular up to rounding."""
    factors, pivots, info = torch.linalg.lu_factor_ex(matrix)
    found = torch.linalg.lu_solve(factors, pivots, given[..., None])[..., 0]
    eps = torch.finfo(given.dtype).eps
    # Two steps of inverse iteration from a vector that no structure of H is orthogonal to: a right-hand side that H
    # reaches has a small residual whatever is added along what H annuls.
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(given.shape[1], dtype=torch.float64, generator=generator).to(given).expand_as(given)
    for _ in range(2):
        probe = probe / torch.linalg.vector_norm(probe, dim=1, keepdim=True)
        probe = torch.linalg.lu_solve(factors, pivots, probe[..., None])[..., 0]
    condition = torch.linalg.matrix_norm(matrix, float("inf")) * torch.linalg.vector_norm(probe, dim=1)
    # Not less, so that NaN is singular.
    return found, (info != 0) | ~(condition < 0.1 / eps) | ~(_residuals(matrix, found, given) < eps**0.5)


def _residuals(matrix: Tensor, found: Tensor, given: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(given, dim=1).clamp_min(torch.finfo(given.dtype).tiny)
    return torch.linalg.vector_norm((matrix @ found[..., None])[..., 0] - given, dim=1) / lengths
