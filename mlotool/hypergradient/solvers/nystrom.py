"""The Nystrom approximation of H."""

import random
from dataclasses import dataclass
from typing import Annotated, Any

import numpy
import torch
from annotated_types import Ge, Le
from torch import Tensor

from mlotool.core.settings import Positive, Seed, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, Vector, View
from mlotool.hypergradient.vector import add, flatten, unflatten

MAX_RANK = 10_000
# Share of the solution that is estimated to be wrong, from which on a status says so.
_WRONG = 0.5

_RETURNED = "v is divided by rho in all directions that the columns of H do not capture, so q may be far too long."


@target("solver")
@dataclass(frozen=True)
class Nystrom(AbstractSolver):
    """The Nystrom method: a low-rank approximation of H from some of its columns.

        q = (H_r + rho I)^-1 v,   H_r = C W^+ C^T

    C are r random columns of H, and W those rows of C that have the same indices.

    For a positive semidefinite H, with `E = H - H_r` and 2-norms (Frangella et al. 2021, arXiv 2110.02820),

        norm((H_r + rho I)^-1 - (H + rho I)^-1) <= norm(E) / (rho (rho + norm(E))),   0 <= E <= H,
        norm((H + rho I)^-1 - H^-1) = rho / (lambda_min (lambda_min + rho)).

    Woodbury's formula suffers from cancellation for a small rho. H_r is diagonalized instead: with `W = U S U^T`, `Y =
    C U S^(-1/2)` and the singular values sigma of Y, the part of v in the span of Y's left singular vectors is divided
    by `sigma^2 + rho`, and the rest by rho. Negative eigenvalues of W are left out, so that v along these directions is
    divided by rho too; the result's status then tells, and a run warns. One more product measures the relative residual
    `norm((H + rho I) q - v) / norm(v)`. The status also tells if it is above 1, or if half of q is estimated to be
    wrong, which a residual may not show for v along large eigenvalues.

    Args:
        rank: r, the number of columns; problems with fewer parameters use all columns.
        rho: number that is added to the diagonal.
        seed: seed of the choice of columns. Each solve of a program draws new columns, by its own generator; tasks
            share them. Calling `solve` directly draws the first ones each time.

    Cost: r + 1 Hessian-vector products and r^2 p operations for p parameters; memory of r vectors of the parameters'
    size.

    Source: Hataya & Yamada 2023 (arXiv 2302.09726).

    Example:
        >>> import torch
        >>> solver = Nystrom(rank=2, rho=1e-4)
        >>> solver.solve(lambda u: [torch.tensor([2.0, 4.0]) * u[0]], [torch.ones(2)]).solution
        [tensor([0.5000, 0.2500])]
    """

    rank: Annotated[int, Ge(1), Le(MAX_RANK)] = 10
    rho: Positive = 0.01
    seed: Seed = 0
    is_differentiable = False
    failures = base.with_not_finite(
        NEGATIVE_CURVATURE=f"{_RETURNED} Raise rho above the most negative eigenvalue's size.",
        INACCURATE=f"{_RETURNED} Raise rank or rho.",
    )

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return q, from the first columns that the seed draws."""
        return self.solve_from(0, matvec, vector, start=start, view=view)[0]

    @numpy.errstate(all="ignore")
    def solve_from(
        self, state: int, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None
    ) -> tuple[SolveResult, int]:
        """Return q, from the next columns, and the new state: how often columns were drawn."""
        num_tasks = base.tasks_of(view)
        rows = flatten(vector, num_tasks)
        # A generator made anew: what is drawn depends on the seed and the number of the solve alone.
        generator = random.Random(f"{self.seed}/{state}")
        indices = generator.sample(range(rows.shape[1]), min(self.rank, rows.shape[1]))
        columns = []
        for index in indices:
            basis = torch.zeros_like(rows)
            basis[:, index] = 1.0
            columns.append(flatten(matvec(unflatten(basis, vector, num_tasks)), num_tasks))
        progress = base.Progress(num_tasks, Status.FIXED)
        sketch = torch.stack(columns, 2)
        has_numbers = rows.isfinite().all(1)
        is_sound = sketch.isfinite().all(2).all(1) & has_numbers
        progress.end_rows(~has_numbers, Status.NON_FINITE_VECTOR)
        progress.end_rows(~is_sound, Status.NON_FINITE)
        factor, is_negative = _factor(torch.where(is_sound[:, None, None], sketch, 0.0), indices)
        # No product is taken at what is not finite.
        whole, shown = self._inverse(factor, rows)
        solution = unflatten(torch.where(is_sound[:, None], whole, 0.0), vector, num_tasks)
        residual = add(add(matvec(solution), solution, self.rho), vector, -1.0)
        error, size = base.norms((residual, vector), num_tasks)
        residuals = base.relative(error, size)
        # Along what no column shows, a residual of x times v comes of an eigenvalue of x rho there: the exact solution
        # is shorter there by 1 + x. The residual alone hides it where v is mostly along large eigenvalues.
        missed, rest = (
            torch.linalg.vector_norm(_outside(a, shown), dim=1) for a in (rows, flatten(residual, num_tasks))
        )
        share = missed / (self.rho * torch.linalg.vector_norm(whole, dim=1))
        is_wrong = share * rest / (missed + rest) > _WRONG
        # H may be not finite where it has no column.
        progress.end_not_finite(error)
        progress.end_rows(is_negative, Status.NEGATIVE_CURVATURE)
        progress.end(residuals > 1, Status.INACCURATE)
        progress.end_rows(is_wrong, Status.INACCURATE)
        return progress.result(solution, len(indices) + 1, residuals), state + 1

    def initial_state(self) -> int:
        """Return 0: no columns were drawn."""
        return 0

    def state_dict(self, state: int) -> dict[str, Any]:
        """Return how often columns were drawn."""
        return {"num_solves": state}

    def load_state(self, saved: dict[str, Any]) -> int:
        """Return how often columns were drawn."""
        return int(saved["num_solves"])

    def _inverse(self, factor: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the solution, and a basis of what the columns show: the rest is divided by rho."""
        left, sigma, _ = torch.linalg.svd(factor, full_matrices=False)
        inside = left.mT @ rows[..., None]
        solution = (left @ (inside / (sigma[..., None] ** 2 + self.rho)))[..., 0] + _outside(rows, left) / self.rho
        return solution, left * (sigma**2 >= self.rho)[:, None]


def _outside(rows: Tensor, left: Tensor) -> Tensor:
    """Return the part of each row that is orthogonal to the columns of its basis."""
    # Twice: what rounding leaves of v inside would be divided by rho.
    for _ in range(2):
        rows = rows - (left @ (left.mT @ rows[..., None]))[..., 0]
    return rows


def _factor(sketch: Tensor, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Return Y with `Y Y^T = C W^+ C^T`, and by system whether W has a negative eigenvalue."""
    core = sketch[:, indices]
    values, vectors = torch.linalg.eigh(0.5 * (core + core.mT))
    largest = values.abs().amax(1, keepdim=True)
    floor = torch.finfo(sketch.dtype).eps * len(indices) * largest
    kept = values > floor
    roots = torch.where(kept, values.clamp_min(0).sqrt(), 1.0)
    return sketch @ (vectors * (kept / roots)[:, None]), (values < -floor.sqrt() * largest.sqrt()).any(1)
