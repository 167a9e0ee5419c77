"""What a solver is."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch import Tensor

from mlotool.program.differentiation import Vector

Matvec = Callable[[Vector], Vector]
"""`u -> H u`."""


class Status(Enum):
    """How a solve ended."""

    CONVERGED = "converged"
    FIXED = "fixed number of terms"
    MAX_ITERATIONS = "max_iterations reached"
    NEGATIVE_CURVATURE = "negative curvature: H is not positive definite"
    SINGULAR = "singular matrix: least-squares solution"
    NON_FINITE = "non-finite product"


@dataclass(frozen=True)
class SolveResult:
    """The best vector found, with how it was found.

    Args:
        solution: approximates `H^-1 v`, one tensor a parameter.
        status: how the solve ended; a failure is never a silent NaN.
        num_products: Hessian-vector products used.
        residual: `norm(H q - v) / norm(v)` if the solver knows it.
    """

    solution: list[Tensor]
    status: Status
    num_products: int
    residual: float | None = None


class AbstractSolver(ABC):
    """Approximates `H^-1 v` for a symmetric H that is known by its products alone."""

    is_polynomial: ClassVar[bool] = False
    """Whether the solution is a fixed polynomial in H, to be differentiated as such; else as the exact solution."""

    needs_products: ClassVar[bool] = True
    """Whether it uses H at all."""

    @abstractmethod
    def solve(self, matvec: Matvec, vector: Vector) -> SolveResult:
        """Return `q` with `H q = v`.

        Args:
            matvec: `u -> H u`.
            vector: `v`, one tensor a parameter.
        """
