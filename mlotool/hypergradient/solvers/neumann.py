"""The truncated Neumann series."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.solvers.progress import Progress, measured
from mlotool.hypergradient.vector import add, choose, norm, scaled
from mlotool.program.differentiation import LowerLoss, Vector


@dataclass
class Neumann(AbstractSolver):
    """`q = a * sum over k < num_terms of (I - a H)^k v`, with `a = step_size`.

    Converges to `H^-1 v` for `0 < a < 2 / lambda_max(H)`; the error is `(I - a H)^num_terms H^-1 v`. Lorraine et
    al. 2020 (arXiv 1911.02590), Eq. 8. `num_terms=1` is `Identity(step_size)`, and what a series that overflows
    falls back to.

    Args:
        num_terms: terms of the series.
        step_size: `a`; the lower learning rate is the usual choice.

    Cost: `num_terms - 1` products; one vector of memory.

    Example:
        >>> import torch
        >>> Neumann(num_terms=60, step_size=0.5).solve(lambda u: [2.0 * u[0]], [torch.ones(1)]).solution
        [tensor([0.5000])]
    """

    num_terms: int
    step_size: float
    is_polynomial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.num_terms, int) or self.num_terms < 1 or not self.step_size > 0:
            raise ConfigError(
                f"Neumann: found num_terms={self.num_terms}, step_size={self.step_size}; expected a whole num_terms "
                ">= 1 and step_size > 0. Correct hypergradient.solver."
            )

    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, lower_loss: LowerLoss | None = None
    ) -> SolveResult:
        """Return the truncated series."""
        # Horner's scheme, total <- v + (I - aH) total: no vector but the sum itself is kept.
        total = list(vector)
        for number in range(1, self.num_terms):
            if number == 1 or torch.is_grad_enabled():
                total = add(add(total, matvec(total), -self.step_size), vector)
            else:
                # Its own tensors by now, and nothing is differentiated.
                torch._foreach_add_(total, list(matvec(total)), alpha=-self.step_size)
                torch._foreach_add_(total, list(vector))
        num_tasks = tasks_of(lower_loss)
        progress = Progress(num_tasks, Status.FIXED)
        overflown = progress.end(~measured(norm(total, num_tasks)).isfinite(), Status.NON_FINITE)
        if bool(overflown.any()):
            total = choose(overflown, vector, total)
        return progress.result(scaled(total, self.step_size), self.num_terms - 1)
