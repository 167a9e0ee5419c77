"""What a solver is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

from mlotool.problem.interface import LowerView, Vector

# `u -> H u`.
Matvec = Callable[[Vector], Vector]


class Status(Enum):
    """How a solve ended, the worst last.

    Example:
        >>> max(Status.CONVERGED, Status.SINGULAR, key=list(Status).index).value
        'a matrix that is singular up to rounding'
    """

    CONVERGED = "converged"
    FIXED = "fixed number of terms"
    MAX_ITERATIONS = "max_iterations reached"
    SINGULAR = "a matrix that is singular up to rounding"
    NEGATIVE_CURVATURE = "negative curvature: H is not positive definite"
    INACCURATE = "a residual greater than that of zero along what the columns of H do not show"
    DIVERGED = "terms that grow: the series diverges"
    NON_FINITE = "numbers that are not finite"
    NON_FINITE_VECTOR = "a right-hand side that is not finite"


@dataclass(frozen=True)
class SolveResult:
    """The best vector found, with how it was found.

    Args:
        solution: approximates `H^-1 v`, one tensor a parameter.
        status: how the solve ended, the worst over tasks; a failure is never a silent NaN.
        num_products: Hessian-vector products used.
        residual: `norm(H q - v) / norm(v)` if the solver knows it, with its damping added to H; the largest over tasks.
        task_statuses: how each task's solve ended; empty without a task axis.
        ending: while a gradient is traced, what differs from replay to replay: the residual (NaN where it is not
            known), the number of products and, by system, the position of its status, (2 + systems,). None else.

    Example:
        >>> import torch
        >>> SolveResult([torch.ones(2)], Status.CONVERGED, num_products=3, residual=1e-7).task_statuses
        ()
    """

    solution: list[Tensor]
    status: Status
    num_products: int
    residual: float | None = None
    task_statuses: tuple[Status, ...] = ()
    ending: Tensor | None = None


# What to do about products that are not finite, whatever the solver.
OVERFLOW = (
    "Look in the problem's loss for second derivatives that are not finite (sqrt, norm, log or a division at zero), or "
    "lower its learning rate if its parameters grow."
)

# The failures of every solver: NaN stays NaN.
NOT_FINITE: Mapping[Status, str] = {
    Status.NON_FINITE: f"NaN is returned. {OVERFLOW}",
    Status.NON_FINITE_VECTOR: (
        "NaN is returned. The gradient of the loss of a problem above with respect to this problem's parameters is not "
        "finite, whatever this problem's own loss is: look in the data and the loss of that one for NaN, and for log, "
        "sqrt, norm or a division at zero."
    ),
}


class AbstractSolver(ABC):
    """Approximates `H^-1 v` for a symmetric H that is known by its products alone: settings, which never change.

    With a leading task axis H is block-diagonal: the systems are solved side by side, and none knows of another.

    Where v, or a product with H, is not finite, the system's solution is not either: a number in its place would look
    like a hypergradient.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Jacobi(AbstractSolver):
        ...     "Takes H for its diagonal, which must be known."
        ...     diagonal: tuple[float, ...]
        ...     def solve(self, matvec, vector, *, start=None, view=None):
        ...         solution = [v / torch.tensor(self.diagonal) for v in vector]
        ...         return SolveResult(solution, Status.FIXED, num_products=0)
        >>> Jacobi((2.0, 4.0)).solve(lambda u: u, [torch.ones(2)]).solution
        [tensor([0.5000, 0.2500])]
    """

    is_polynomial: ClassVar[bool] = False
    """Whether the solution is a fixed polynomial in H, to be differentiated as such; else as the exact solution."""

    is_differentiable: ClassVar[bool] = True
    """Whether either of these is right; False for an approximation that is neither."""

    needs_products: ClassVar[bool] = True
    """Whether it uses H at all."""

    uses_start: ClassVar[bool] = False
    """Whether it begins at the last solution, if that is given."""

    uses_loss: ClassVar[bool] = False
    """Whether it evaluates the loss itself."""

    is_traceable: ClassVar[bool] = False
    """Whether a trace of a solve holds for the next one, but for conditions that the solve has put down."""

    failures: ClassVar[Mapping[Status, str]] = {}
    """By status that is a failure, what is returned then and what to do about it, in whole sentences."""

    @abstractmethod
    def solve(
        self, matvec: Matvec, vector: Vector, *, start: Vector | None = None, view: LowerView | None = None
    ) -> SolveResult:
        """Return `q` with `H q = v`.

        Args:
            matvec: `u -> H u`.
            vector: `v`, one tensor a parameter.
            start: where an iterative solver begins, the last solution say; None is zero.
            view: whose H it is, for its task axis, its module and its optimizer; its inputs are bound, so that
                `view(theta, ())` is the loss. None without any of these.
        """

    def solve_from(
        self, state: Any, matvec: Matvec, vector: Vector, *, start: Vector | None = None, view: LowerView | None = None
    ) -> tuple[SolveResult, Any]:
        """Return what `solve` returns, and what is kept for the next solve.

        Args:
            state: what was kept by the last solve, `initial_state` at first.
            matvec: as for `solve`.
            vector: as for `solve`.
            start: as for `solve`.
            view: as for `solve`.
        """
        return self.solve(matvec, vector, start=start, view=view), state

    def check(self, problem: str, num_tasks: int | None) -> None:
        """Refuse a problem that it cannot do with, or a missing package.

        Args:
            problem: the problem whose solution is differentiated.
            num_tasks: length of its task axis; None without one.

        Raises:
            ConfigError: it cannot.
        """

    def initial_state(self) -> Any:
        """Return what is kept before the first solve; None for a solver that keeps nothing."""
        return None

    def state_dict(self, state: Any) -> dict[str, Any]:
        """Return what a resumed run needs of the state, in plain containers."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> Any:
        """Return the state that `state_dict` has saved."""
        return self.initial_state()
