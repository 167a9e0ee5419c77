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

_RETURNED = "v is divided by rho along all that the columns of H do not show, which may be far too long."


@target("solver")
@dataclass(frozen=True)
class Nystrom(AbstractSolver):
    """`q = (H_r + rho I)^-1 v`, with `H_r = C W^+ C^T` from r random columns C of H and the rows W of C at these.

    For a positive semidefinite H, with `E = H - H_r` and 2-base.norms (Frangella et al. 2021, arXiv 2110.02820),

        norm((H_r + rho I)^-1 - (H + rho I)^-1) <= norm(E) / (rho (rho + norm(E))),   0 <= E <= H,
        norm((H + rho I)^-1 - H^-1) = rho / (lambda_min (lambda_min + rho)).

    In place of Woodbury's formula, which cancels for a small rho, H_r is diagonalised: with `W = U S U^T` and a thin
    `C U S^(-1/2) = Y`, `q = Y's left singular part / (sigma^2 + rho) + the rest / rho`. Negative eigenvalues of W are
    left out, with a status that says so: those directions are treated as what the columns miss, and `v` along both is
    divided by rho. A last product measures `norm((H + rho I) q - v) / norm(v)`; a status tells where it is
    above 1, or where half of q is estimated to be wrong: v may hide it along large eigenvalues.

    Args:
        rank: r, columns; of smaller problems all.
        rho: added to the diagonal.
        seed: of the columns. Each solve of a program draws new ones, by a generator of its own; tasks share them.
            `solve` alone draws the first ones.

    Cost: r + 1 products; r vectors of memory; r^2 p operations.

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
        """Return the product of the inverse with `v`, by the first columns."""
        return self.solve_from(0, matvec, vector, start=start, view=view)[0]

    @numpy.errstate(all="ignore")
    def solve_from(
        self, state: int, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None
    ) -> tuple[SolveResult, int]:
        """Return the same by the next columns, and how often columns were drawn, which is the state."""
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
