"""Systems that are solved side by side: the numbers they decide by, which of them still run, how they begin and end.

The numbers of a single system are floats of numpy, those of tasks are tensors, with one number a task: a float costs a
fiftieth of a tensor, and both follow IEEE 754, in which a division by zero is an infinity or NaN. While a gradient is
traced all are tensors; in a joint trace, which serves many runs, even the truths of a single system are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mlotool.core.tracing import assume, decided, is_joint, is_tracing
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.vector import add, choose, dot, norm, scaled, zeros
from mlotool.problem.interface import LowerView, Vector

# A float of numpy, or a tensor in float64 with one number a system: what can be said of either, not as a type.
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


def where(condition: Truth, a: Any, b: Any) -> Any:
    """Return `a` where the condition holds, and `b` elsewhere."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def larger(a: Number, b: Number) -> Number:
    """Return the larger one; NaN where one of them is NaN."""
    return where((a > b) | (a != a), a, b)


def root(a: Number) -> Number:
    """Return the square root."""
    return a.sqrt() if isinstance(a, Tensor) else numpy.sqrt(a)


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


def count_if(condition: Truth) -> int | Tensor:
    """Return what counts for 1 where `may_hold(condition)`: 1; in a joint trace, which comes there anyway, 1 or 0."""
    return condition.any().long() if isinstance(condition, Tensor) and is_joint() else 1


class Progress:
    """The statuses of one solve: one of each task, or a single one.

    Args:
        num_tasks: length of the task axis; None without one.
        status: of a system that nothing ends.

    Attributes:
        running: by system, whether nothing has ended it.
        shape: of a tensor with a value for each system.

    Example:
        >>> progress = Progress(num_tasks=None)
        >>> progress.end(True, Status.CONVERGED), progress.is_running
        (True, False)
        >>> progress.result([], num_products=2).status.value
        'converged'
    """

    def __init__(self, num_tasks: int | None, status: Status = Status.MAX_ITERATIONS) -> None:
        self.shape = () if num_tasks is None else (num_tasks,)
        has_truths = num_tasks is not None or is_joint()
        self.running: Truth = torch.full(self.shape, True) if has_truths else True
        self._codes: int | Tensor = _ORDER.index(status)
        if has_truths:
            self._codes = torch.full(self.shape, self._codes)

    @property
    def is_running(self) -> bool:
        """Whether any system may be."""
        return may_hold(self.running)

    @property
    def one(self) -> int | Tensor:
        """What a product counts that is taken where any system may run."""
        return count_if(self.running)

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
        codes, largest, ending = self._codes, None, None
        is_lost = codes >= _ORDER.index(Status.NON_FINITE)
        if may_hold(is_lost):
            solution = choose(is_lost, scaled(solution, math.nan), solution)
        is_reported = is_tracing() and isinstance(codes, Tensor)
        if residuals is not None:
            worst = residuals.max() if isinstance(residuals, Tensor) else residuals
            if (is_reported and isinstance(worst, Tensor)) or decided(abs(worst) < math.inf):
                largest = worst if is_tracing() else float(worst)
        if not isinstance(codes, Tensor):
            return SolveResult(solution, _ORDER[codes], int(num_products), largest)
        if is_reported:
            ending = torch.cat([torch.as_tensor(num_products, device=codes.device).reshape(1), codes.reshape(-1)])
        with disable_proxy_modes_tracing():
            # While tracing those of this time, and not of another replay.
            status, statuses = ended_with(codes.reshape(-1).tolist(), has_tasks=bool(codes.dim()))
            return SolveResult(solution, status, int(num_products), largest, statuses, ending)


def ended_with(codes: Sequence[float], *, has_tasks: bool) -> tuple[Status, tuple[Status, ...]]:
    """Return the worst status, and those of the tasks, from positions in `Status` by system."""
    statuses = tuple(_ORDER[int(code)] for code in codes)
    return max(statuses, key=_ORDER.index), statuses if has_tasks else ()


def growth(first: Number, last: Number, product: Number, progress: Progress) -> None:
    """End the systems whose terms `(I - a H)^k v` have grown: more terms would lead away from `H^-1 v`.

    Args:
        first: norm of the first term.
        last: norm of the last one.
        product: the last two terms' inner product: a step that is too large turns the sign of the term that grows, and
            negative curvature does not.
        progress: takes the statuses.
    """
    # A term that H annuls stays as it is up to rounding, which in finite differences is large.
    progress.end((last > GROWTH * first) & (product < 0), Status.DIVERGED)
    progress.end(last > CURVED_GROWTH * first, Status.NEGATIVE_CURVATURE)


@dataclass
class LinearSystem:
    """`A q = v` with `A = H + damping I` before the first iteration; one system a task where there are tasks.

    Args:
        matvec: `u -> A u`.
        inner: `(a, b) -> a'b`, a number to decide by for each system.
        progress: which systems still run.
        size: `v'v`, by system.
        eps: rounding of one number.
        target: squared norm of a residual that is small enough, by system.
        nothing: zeros in the shapes of `v`.
        vector: `v`, with zeros for a system that does not run.
        solution: where the iteration begins.
        residual: `v - A q` there.
        squared: its squared norm, by system.
        is_cold: by system, whether it begins at zero, and not at the start that was given.
        num_products: products with A so far.
    """

    matvec: Matvec
    inner: Callable[[Vector, Vector], Number]
    progress: Progress
    size: Number
    eps: float
    target: Number
    nothing: list[Tensor]
    vector: list[Tensor]
    solution: list[Tensor]
    residual: list[Tensor]
    squared: Number
    is_cold: Truth
    num_products: int | Tensor

    def product(self, direction: Vector) -> Vector:
        """Return `A u`, and count it."""
        product = self.matvec(direction)
        self.num_products = self.num_products + self.progress.one
        return product

    def of_running(self, vector: Vector) -> list[Tensor]:
        """Return a vector with zeros for the systems that have ended, whose numbers may be NaN."""
        return choose(self.progress.running, vector, self.nothing)

    def result(self, solution: list[Tensor], squared: Number) -> SolveResult:
        """Return the result, by the squared norms of the residuals."""
        return self.progress.result(solution, self.num_products, root(relative(squared, self.size)))


def begin_system(
    solver: AbstractSolver,
    tolerance: float,
    damping: float,
    matvec: Matvec,
    vector: Vector,
    *,
    start: Vector | None,
    view: LowerView | None,
) -> LinearSystem | SolveResult:
    """Return the system before its first iteration, or its solution where there is nothing to iterate.

    Args:
        solver: solves a system whose `v` is scaled, where that of this one is very small or large.
        tolerance: relative residual at which a system has converged.
        damping: added to the diagonal of H.
        matvec, vector, start, view: as for `AbstractSolver.solve`.
    """
    num_tasks = tasks_of(view)

    def damped(direction: Vector) -> Vector:
        product = matvec(direction)
        return add(product, direction, damping) if damping else product

    def inner(a: Vector, b: Vector) -> Number:
        return measured(dot(a, b, num_tasks))

    progress, nothing = Progress(num_tasks), zeros(vector)
    size = inner(vector, vector)
    if (result := _solved_in_range(solver, size, matvec, vector, start, view)) is not None:
        return result
    progress.end_not_finite(size, Status.NON_FINITE_VECTOR)
    progress.end(size == 0, Status.CONVERGED)
    if not progress.is_running:
        return progress.result(nothing, 0, relative(size, size))
    vector = choose(progress.running, vector, nothing)
    solution, residual, is_cold = nothing, list(vector), True
    num_products: int | Tensor = 0
    if start is not None:
        num_products = progress.one
        # One that is worse than zero is no start; nor is one with a NaN, which is not less.
        left = add(vector, damped(start), -1.0)
        is_cold = ~(inner(left, left) < inner(vector, vector))
        solution, residual = choose(is_cold, nothing, start), choose(is_cold, vector, left)
    squared = inner(residual, residual)
    # Below eps nothing but rounding is left, and a further step would divide by it.
    eps = torch.finfo(vector[0].dtype).eps
    target = max(tolerance, eps) ** 2 * size
    progress.end(squared <= target, Status.CONVERGED)
    return LinearSystem(
        damped, inner, progress, size, eps, target, nothing, vector, solution, residual, squared, is_cold, num_products
    )


def _solved_in_range(
    solver: AbstractSolver, size: Number, matvec: Matvec, vector: Vector, start: Vector | None, view: LowerView | None
) -> SolveResult | None:
    """Return the solution by way of `H (q / c) = v / c`, c a power of two; None where v is as it should be.

    Else a vector of length 1e-23 has the squared norm 0 in float32, and would seem to be solved by zero.
    """
    is_out = (size < 1e-24) | ~(size < 1e24)
    if is_joint() and isinstance(is_out, Tensor):
        # The run of which this is so takes the step by its own plan.
        assume(~is_out.any())
        return None
    if not may_hold(is_out):
        return None
    # By system the power of two near the largest entry; division by it is exact.
    rows = [tensor.detach().abs().reshape(tasks_of(view) or 1, -1).amax(1) for tensor in vector if tensor.numel()]
    peaks = torch.stack(rows).amax(0).cpu().double()
    exponents = torch.where(peaks.isfinite() & (peaks > 0), peaks, 1.0).log2().round()
    powers = torch.exp2(exponents.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))
    if not may_hold(powers != 1):
        return None
    factor = float(powers[0]) if tasks_of(view) is None else powers
    start = None if start is None else scaled(start, 1.0 / factor)
    result = solver.solve(matvec, scaled(vector, 1.0 / factor), start=start, view=view)
    return replace(result, solution=scaled(result.solution, factor))
