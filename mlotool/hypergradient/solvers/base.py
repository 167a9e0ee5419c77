"""What a solver is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mlotool.core.tracing import assume, decided, is_joint, is_tracing
from mlotool.hypergradient.vector import add, choose, dot, norm, scaled, zeros
from mlotool.problem.interface import LowerView
from mlotool.problem.interface import Vector as Vector

# `u -> H u`.
Matvec = Callable[[Vector], Vector]

# Where a solve begins, and whose H it is; None is zero, and none in particular.
Start = Vector | None
View = LowerView | None


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


class SolveResult(NamedTuple):
    """The result of a solve: the best vector that was found, and how the solve ended.

    Attributes:
        solution: approximates `H^-1 v`, one tensor per parameter.
        status: how the solve ended; with tasks, the worst status. A failure is always reported here.
        num_products: number of Hessian-vector products.
        residual: `norm(H q - v) / norm(v)`, with the solver's damping added to H (with tasks, the largest); None if the
            solver does not compute it.
        task_statuses: how the solve of each task ended; empty without tasks.
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
        "NaN is returned. The gradient of an upper problem's loss with respect to this problem's parameters is not "
        "finite. Look in the data and the loss of that upper problem for NaN, and for log, sqrt, norm or a division at "
        "zero."
    ),
}


def with_not_finite(**failures: str) -> Mapping[Status, str]:
    """Return the failures of a solver, by name of the status, with those of every solver."""
    return {**NOT_FINITE, **{Status[name]: text for name, text in failures.items()}}


class AbstractSolver(ABC):
    """Base class of solvers, which approximate `H^-1 v` for a symmetric H from Hessian-vector products `u -> H u`.

    A solver holds settings only, which never change. With a leading task axis, H is block-diagonal: the systems of the
    tasks are solved at the same time, independently of each other.

    If v or a product with H is not finite, the solution is NaN, since a finite number would look like a hypergradient.

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

    is_traceable: ClassVar[bool] = False
    """Whether a trace of a solve holds for the next one, but for conditions that the solve has put down."""

    failures: ClassVar[Mapping[Status, str]] = {}
    """By status that is a failure, what is returned then and what to do about it, in whole sentences."""

    def uses_loss(self, view: LowerView) -> bool:
        """Return whether it evaluates the loss of a problem itself."""
        return False

    @abstractmethod
    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return `q` with `H q = v`.

        Args:
            matvec: `u -> H u`.
            vector: `v`, one tensor per parameter.
            start: where an iterative solver begins, the last solution say; None is zero.
            view: whose H it is, for its task axis, its module and its optimizer; its inputs are bound, so that
                `view(theta, ())` is the loss. None without any of these.
        """

    def solve_from(
        self, state: Any, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None
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


# A float of numpy, or a tensor in float64 with one number per system: what can be said of either, not as a type.
Number = Any

# A truth, or a tensor with one a system.
Truth = Any

_ORDER = tuple(Status)
# Beyond it the inverse of a power of two leaves float32.
_MAX_EXPONENT = 120

# Of a series' last term over its first, from which on a step that is too large is the reason.
GROWTH = 1.01

# The same of negative curvature, which every network has: a short series that grows less is a sound one of steps.
CURVED_GROWTH = 2.0


def tasks_of(view: View) -> int | None:
    """Return the length of the task axis.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> view = LowerView(LowerProblem("w", num_tasks=3), (torch.ones(3, 2),), lambda theta, inputs: theta[0].sum())
        >>> tasks_of(view), tasks_of(None)
        (3, None)
    """
    return None if view is None else view.problem.num_tasks


def where(condition: Truth, a: Any, b: Any) -> Any:
    """Return `a` where the condition holds, and `b` elsewhere."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def relative(lengths: Number, of: Number) -> Number:
    """Return `lengths / of`; zero has no residual relative to zero."""
    return where(lengths == 0, 0.0, lengths / of)


def measured(values: Tensor) -> Number:
    """Return values to decide by, 0-D or one a task: constant, on the CPU, in float64."""
    values = values.detach()
    if values.dim():
        return values.cpu().double()
    return values.double() if is_tracing() else numpy.float64(values.item())


def norms(vectors: Sequence[Vector], num_tasks: int | None) -> list[Number]:
    """Return the 2-norms of several vectors to decide by, with one transfer from the device."""
    lengths = measured(torch.stack([norm(vector, num_tasks) for vector in vectors]))
    assert isinstance(lengths, Tensor)
    return list(lengths.numpy() if num_tasks is None and not is_tracing() else lengths.unbind())


def may_hold(condition: Truth) -> bool:
    """Return whether it holds for any system, for what changes none of the others: in a joint trace it may."""
    return (is_joint() or decided(condition.any())) if isinstance(condition, Tensor) else condition


class Progress:
    """The statuses of one solve: one of each task, or a single one.

    Args:
        num_tasks: length of the task axis; None without one.
        status: of a system that nothing ends.

    Attributes:
        running: by system, whether nothing has ended it.

    Example:
        >>> progress = Progress(num_tasks=None)
        >>> progress.end(True, Status.CONVERGED), progress.is_running
        (True, False)
        >>> progress.result([], num_products=2).status.value
        'converged'
    """

    def __init__(self, num_tasks: int | None, status: Status = Status.MAX_ITERATIONS) -> None:
        self._shape = () if num_tasks is None else (num_tasks,)
        has_truths = num_tasks is not None or is_joint()
        self.running: Truth = torch.full(self._shape, True) if has_truths else True
        self._codes: Any = torch.full(self._shape, _ORDER.index(status)) if has_truths else _ORDER.index(status)

    @property
    def is_running(self) -> bool:
        """Whether any system may be."""
        return may_hold(self.running)

    def count_if(self, condition: Truth) -> int | Tensor:
        """Return 1, what a product counts that is taken where the condition may hold; in a joint trace 1 or 0."""
        return condition.any().long() if isinstance(condition, Tensor) and is_joint() else 1

    def end(self, condition: Truth, status: Status) -> Truth:
        """End the running systems for which the condition holds; return which these are."""
        code = _ORDER.index(status)
        if isinstance(self.running, Tensor):
            ended = self.running & condition
            self.running, self._codes = self.running & ~ended, torch.where(ended, code, self._codes)
            return ended
        if self.running and decided(condition):
            self.running, self._codes = False, code
            return True
        return False

    def end_rows(self, condition: Tensor, status: Status) -> None:
        """End the running systems by a tensor with a row per system, on any device."""
        self.end(condition.cpu().reshape(self._shape), status)

    def end_not_finite(self, number: Number, status: Status = Status.NON_FINITE) -> Truth:
        """End the running systems whose number is not finite; return which these are."""
        return self.end(~(abs(number) < math.inf), status)

    def result(
        self, solution: list[Tensor], num_products: int | Tensor, residuals: Number | None = None
    ) -> SolveResult:
        """Return the result, NaN for the systems that met numbers which are not finite.

        Args:
            solution: of all systems.
            num_products: of all systems together: a product serves each.
            residuals: by system; NaN where it is not known.
        """
        codes = self._codes
        is_lost = codes >= _ORDER.index(Status.NON_FINITE)
        if may_hold(is_lost):
            solution = choose(is_lost, scaled(solution, math.nan), solution)
        worst, ending = where(is_lost, math.nan, math.nan if residuals is None else residuals), None
        if isinstance(worst, Tensor):
            worst = worst.max()
        if is_tracing() and (isinstance(codes, Tensor) or residuals is not None):
            # What differs from replay to replay.
            numbers = [worst, num_products, codes]
            ending = torch.cat([torch.as_tensor(number, dtype=torch.float64).reshape(-1) for number in numbers])
        with disable_proxy_modes_tracing() if is_tracing() else nullcontext():
            # While tracing those of this time, and not of another replay.
            numbers = [codes] if isinstance(codes, int) else codes.reshape(-1).tolist()
            status, statuses = ended_with(numbers, has_tasks=bool(self._shape))
            residual = float(worst) if math.isfinite(worst) else None
            return SolveResult(solution, status, int(num_products), residual, statuses, ending)


def ended_with(codes: Sequence[float], *, has_tasks: bool) -> tuple[Status, tuple[Status, ...]]:
    """Return the worst status, and those of the tasks, from positions in `Status` by system."""
    statuses = tuple(_ORDER[int(code)] for code in codes)
    return max(statuses, key=_ORDER.index), statuses if has_tasks else ()


def finished(
    vector: Vector,
    solution: list[Tensor],
    num_tasks: int | None,
    num_products: int = 0,
    residual: Number | None = None,
    *,
    status: Status = Status.FIXED,
) -> SolveResult:
    """Return the result of a solve that takes no steps, which fails where its vector or its solution is not finite."""
    progress = Progress(num_tasks, status)
    of_vector, whole = norms((vector, solution), num_tasks)
    progress.end_not_finite(of_vector, Status.NON_FINITE_VECTOR)
    progress.end_not_finite(whole)
    return progress.result(solution, num_products, residual)


def end_growing(progress: Progress, first: Number, last: Number, product: Number) -> None:
    """End the systems whose terms `(I - a H)^k v` have grown: more terms would lead away from `H^-1 v`.

    Args:
        progress: takes the statuses.
        first: norm of the first term.
        last: norm of the last one.
        product: the last two terms' inner product: a step that is too large turns the sign of the term that grows, and
            negative curvature does not.
    """
    # A term that H annuls stays as it is up to rounding, which in finite differences is large.
    progress.end((last > GROWTH * first) & (product < 0), Status.DIVERGED)
    progress.end(last > CURVED_GROWTH * first, Status.NEGATIVE_CURVATURE)


class LinearSystem:
    """`A q = v` with `A = H + damping I` before the first iteration; one system per task where there are tasks.

    Where v is very long or short, a power of two is taken out of it, which is exact: the square of a length of 1e-23
    is 0 in float32, and v would seem to be solved by zero.

    Args:
        settings: a solver, with `tolerance` (relative residual at which a system has converged) and `damping` (added to
            the diagonal of H).
        matvec, vector, start, view: as for `AbstractSolver.solve`.

    Attributes:
        progress: which systems still run.
        nothing: zeros in the shapes of `v`.
        vector: `v`, with zeros for a system that does not run.
        size: `v'v`, by system.
        solution: where the iteration begins.
        residual: `v - A q` there.
        squared: its squared norm, by system.
        target: squared norm of a residual that is small enough, by system.
        is_cold: by system, whether it begins at zero, and not at the start that was given.
        eps: rounding of one number.
        num_products: products with A so far.
    """

    def __init__(self, settings: Any, matvec: Matvec, vector: Vector, start: Start, view: View) -> None:
        self._matvec, self._damping, self._num_tasks = matvec, settings.damping, tasks_of(view)
        self.progress = Progress(self._num_tasks)
        self.num_products: int | Tensor = 0
        self.size = self.inner(vector, vector)
        self._scale = self._power_of_two(vector)
        if self._scale is not None:
            vector = scaled(vector, 1.0 / self._scale)
            start = None if start is None else scaled(start, 1.0 / self._scale)
            self.size = self.inner(vector, vector)
        self.progress.end_not_finite(self.size, Status.NON_FINITE_VECTOR)
        self.progress.end(self.size == 0, Status.CONVERGED)
        self.nothing = zeros(vector)
        self.vector = self.of_running(vector)
        self.solution, self.residual, self.is_cold = self.nothing, self.vector, True
        if start is not None and self.progress.is_running:
            # One that is worse than zero is no start; nor is one with a NaN, which is not less.
            left = add(self.vector, self.product(start), -1.0)
            self.is_cold = ~(self.inner(left, left) < self.inner(self.vector, self.vector))
            self.solution = choose(self.is_cold, self.nothing, start)
            self.residual = choose(self.is_cold, self.vector, left)
        self.squared = self.inner(self.residual, self.residual)
        # Below eps nothing but rounding is left, and a further step would divide by it.
        self.eps = torch.finfo(vector[0].dtype).eps
        self.target = max(settings.tolerance, self.eps) ** 2 * self.size
        self.progress.end(self.squared <= self.target, Status.CONVERGED)

    def inner(self, a: Vector, b: Vector) -> Number:
        """Return `a'b`, a number to decide by for each system."""
        return measured(dot(a, b, self._num_tasks))

    def product(self, direction: Vector, needed: Truth = None) -> Vector:
        """Return `A u`, and count it where a system needs it: one that runs, by default."""
        takers = self.progress.running if needed is None else needed
        self.num_products = self.num_products + self.progress.count_if(takers)
        product = self._matvec(direction)
        return add(product, direction, self._damping) if self._damping else product

    def of_running(self, vector: Vector) -> list[Tensor]:
        """Return a vector with zeros for the systems that have ended, whose numbers may be NaN."""
        return choose(self.progress.running, vector, self.nothing)

    def result(self, solution: list[Tensor], squared: Number) -> SolveResult:
        """Return the result, by the squared norms of the residuals."""
        if self._scale is not None:
            solution = scaled(solution, self._scale)
        return self.progress.result(solution, self.num_products, relative(squared, self.size) ** 0.5)

    def _power_of_two(self, vector: Vector) -> float | Tensor | None:
        """Return by system the power of two near the largest entry; None where v is as long as it should be."""
        is_out = (self.size < 1e-24) | ~(self.size < 1e24)
        if is_joint() and isinstance(is_out, Tensor):
            # The run of which this is so takes the step by its own plan.
            assume(~is_out.any())
            return None
        if not may_hold(is_out):
            return None
        rows = [tensor.detach().abs().reshape(self._num_tasks or 1, -1).amax(1) for tensor in vector if tensor.numel()]
        peaks = torch.stack(rows).amax(0).cpu().double()
        exponents = torch.where(peaks.isfinite() & (peaks > 0), peaks, 1.0).log2().round()
        powers = torch.exp2(exponents.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))
        return float(powers[0]) if self._num_tasks is None else powers
