"""Which of the systems that are solved side by side still run, and how the others ended."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mlotool.core.arguments import require_fields
from mlotool.core.errors import ConfigError
from mlotool.core.tracing import assume, decided, is_joint, is_tracing
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.vector import add, choose, dot, norm, scaled, zeros
from mlotool.problem.interface import LowerView, Vector

Number = float | Tensor
"""A float, or a tensor in float64, one value a system; while tracing a single system has a tensor, too."""

Truth = bool | Tensor
"""A bool, or a tensor of them, one a system."""


def measured(values: Tensor) -> Number:
    """Return values to decide by, 0-D or one a task: constant, on the CPU, in float64.

    Example:
        >>> import torch
        >>> measured(torch.tensor(0.5)), measured(torch.tensor([0.5, 1.0]))
        (0.5, tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    values = values.detach()
    if values.dim():
        return values.cpu().double()
    return values.double() if is_tracing() else float(values)


def where(condition: Truth, a: Number, b: Number) -> Number:
    """Return `a` where the condition holds, and `b` elsewhere.

    Example:
        >>> import torch
        >>> where(True, 1.0, 2.0), where(torch.tensor([True, False]), 1.0, 2.0)
        (1.0, tensor([1., 2.]))
    """
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def divided(a: Number, b: Number) -> Number:
    """Return `a / b`.

    Example:
        >>> divided(1.0, 4.0), divided(1.0, 0.0), divided(0.0, 0.0)
        (0.25, inf, nan)
    """
    if isinstance(a, float) and isinstance(b, float) and b == 0.0:
        return math.nan if a == 0.0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def larger(a: Number, b: Number) -> Number:
    """Return the larger one; NaN where one of them is NaN.

    Example:
        >>> import torch
        >>> larger(1.0, 2.0), larger(torch.tensor([1.0, 3.0]), 2.0)
        (2.0, tensor([2., 3.]))
    """
    if isinstance(a, float) and isinstance(b, float):
        return a if a > b or math.isnan(a) else b
    if isinstance(a, float) or isinstance(b, float):
        tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
        assert isinstance(tensor, Tensor)
        return tensor.clamp_min(number)
    return torch.maximum(a, b)


def size_of(a: Number) -> Number:
    """Return the absolute value.

    Example:
        >>> size_of(-2.0)
        2.0
    """
    return a.abs() if isinstance(a, Tensor) else abs(a)


def root(a: Number) -> Number:
    """Return the square root; NaN of a negative number.

    Example:
        >>> root(4.0), root(-1.0)
        (2.0, nan)
    """
    if isinstance(a, Tensor):
        return a.sqrt()
    return math.sqrt(a) if a >= 0.0 else math.nan


def is_finite(a: Number) -> Truth:
    """Return whether a number is.

    Example:
        >>> is_finite(1.0), is_finite(float("nan"))
        (True, False)
    """
    return a.isfinite() if isinstance(a, Tensor) else math.isfinite(a)


def negated(a: Truth) -> Truth:
    """Return the opposite.

    Example:
        >>> import torch
        >>> negated(True), negated(torch.tensor([True, False]))
        (False, tensor([False,  True]))
    """
    return ~a if isinstance(a, Tensor) else not a


def may_hold(a: Truth) -> bool:
    """Return whether it holds for any system, for what changes none of the others: in a joint trace it may.

    Example:
        >>> import torch
        >>> may_hold(torch.tensor([True, False])), may_hold(torch.tensor(False))
        (True, False)
    """
    return (is_joint() or holds_anywhere(a)) if isinstance(a, Tensor) else a


def count_if(a: Truth) -> int | Tensor:
    """Return what counts for 1 where `may_hold(a)`: 1; in a joint trace, which comes there anyway, 1 or 0 by run.

    Example:
        >>> count_if(True)
        1
    """
    return a.any().long() if isinstance(a, Tensor) and is_joint() else 1


def holds_anywhere(a: Truth) -> bool:
    """Return whether it holds for any system.

    Example:
        >>> import torch
        >>> holds_anywhere(torch.tensor([True, False]))
        True
    """
    return decided(a.any()) if isinstance(a, Tensor) else a


def holds_everywhere(a: Truth) -> bool:
    """Return whether it holds for every system.

    Example:
        >>> import torch
        >>> holds_everywhere(torch.tensor([True, False]))
        False
    """
    return decided(a.all()) if isinstance(a, Tensor) else a


def filled(value: float, num_tasks: int | None) -> Number:
    """Return a number for each system.

    Example:
        >>> filled(0.5, None), filled(0.5, 2)
        (0.5, tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    return value if num_tasks is None else torch.full((num_tasks,), value, dtype=torch.float64)


def known(value: bool, num_tasks: int | None) -> Truth:
    """Return a truth for each system; in a joint trace a tensor, that may become another one by run.

    Example:
        >>> known(True, None), known(True, 2)
        (True, tensor([True, True]))
    """
    if num_tasks is None:
        return torch.tensor(value) if is_joint() else value
    return torch.full((num_tasks,), value)


_ORDER = tuple(Status)

GROWTH = 1.01
"""Of a series' last term over its first, from which on a step that is too large is the reason."""

CURVED_GROWTH = 2.0
"""The same of negative curvature, which every network has: a short series that grows less is a sound one of steps."""


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
        self.running: Truth = known(True, num_tasks)
        self._codes: int | torch.Tensor = _ORDER.index(status)
        if isinstance(self.running, torch.Tensor):
            self._codes = torch.full(self.shape, self._codes)

    @property
    def is_running(self) -> bool:
        """Whether any system may be."""
        return may_hold(self.running)

    @property
    def one(self) -> int | torch.Tensor:
        """What a product counts that is taken where any system may run: 1, or 0 of a joint trace in which none does."""
        return count_if(self.running)

    def end(self, condition: Truth, status: Status) -> Truth:
        """End the running systems for which the condition holds; return which these are."""
        if not isinstance(self.running, torch.Tensor):
            ended = self.running and decided(condition)
            if ended:
                self.running, self._codes = False, _ORDER.index(status)
            return ended
        ended_ones = self.running & condition
        self._codes = torch.where(ended_ones, _ORDER.index(status), self._codes)
        self.running = self.running & ~ended_ones
        return ended_ones

    def end_unsound(self, size: Number) -> None:
        """End the running systems whose right-hand side is not finite.

        Args:
            size: by system, a norm of the right-hand side, or its square.
        """
        self.end(negated(is_finite(size)), Status.NON_FINITE_VECTOR)

    def result(
        self, solution: list[torch.Tensor], num_products: int | torch.Tensor, residuals: Number | None = None
    ) -> SolveResult:
        """Return the result, NaN for the systems that met numbers which are not finite.

        Args:
            solution: of all systems.
            num_products: of all systems together: a product serves each.
            residuals: by system; NaN where it is not known.
        """
        codes, largest = self._codes, None
        is_lost = codes >= _ORDER.index(Status.NON_FINITE)
        if may_hold(is_lost):
            solution = choose(is_lost, scaled(solution, math.nan), solution)
        is_reported = is_tracing() and isinstance(codes, torch.Tensor)
        if residuals is not None and (is_reported or holds_everywhere(is_finite(residuals))):
            largest = residuals.max() if isinstance(residuals, torch.Tensor) else residuals
            largest = largest if is_tracing() else float(largest)
        if not isinstance(codes, torch.Tensor):
            return SolveResult(solution, _ORDER[codes], int(num_products), largest)
        ending = None
        if is_reported:
            ending = torch.cat([torch.as_tensor(num_products, device=codes.device).reshape(1), codes.reshape(-1)])
        with disable_proxy_modes_tracing():
            # While tracing those of this time, and not of another replay.
            (status, statuses), count = (
                ended_with(codes.reshape(-1).tolist(), has_tasks=bool(codes.dim())),
                int(num_products),
            )
        return SolveResult(solution, status, count, largest, statuses, ending)


def ended_with(codes: Sequence[float], *, has_tasks: bool) -> tuple[Status, tuple[Status, ...]]:
    """Return the worst status, and those of the tasks.

    Args:
        codes: positions in Status, by system.
        has_tasks: each system is a task.

    Example:
        >>> ended_with([0, 2], has_tasks=True)[0].value
        'max_iterations reached'
    """
    statuses = tuple(_ORDER[int(code)] for code in codes)
    return max(statuses, key=_ORDER.index), statuses if has_tasks else ()


def relative(lengths: Number, of: Number) -> Number:
    """Return `lengths / of`; zero has no residual relative to zero.

    Example:
        >>> relative(1.0, 4.0), relative(0.0, 0.0)
        (0.25, 0.0)
    """
    return where(lengths == 0, 0.0, divided(lengths, of))


def norms(vectors: Sequence[Vector], num_tasks: int | None) -> list[Number]:
    """Return the 2-norms of several vectors to decide by, with one transfer from the device.

    Example:
        >>> import torch
        >>> norms([[torch.tensor([3.0, 4.0])], [torch.ones(4)]], None)
        [5.0, 2.0]
    """
    found = measured(torch.stack([norm(vector, num_tasks) for vector in vectors]))
    assert isinstance(found, torch.Tensor)
    return list(found.tolist() if num_tasks is None and not is_tracing() else found.unbind())


def growth(first: Number, last: Number, product: Number, progress: Progress) -> None:
    """End the systems whose terms `(I - a H)^k v` have grown: more terms would lead away from `H^-1 v`.

    Args:
        first: norm of the first term.
        last: norm of the last one.
        product: the last two terms' inner product: a step that is too large turns the sign of the term that grows, and
            negative curvature does not.
        progress: takes the statuses.

    Example:
        >>> progress = Progress(num_tasks=None)
        >>> growth(1.0, 1.5, -1.2, progress)
        >>> progress.result([], num_products=3).status.name
        'DIVERGED'
    """
    # A term that H annuls stays as it is up to rounding, which in finite differences is large.
    progress.end((last > GROWTH * first) & (product < 0), Status.DIVERGED)
    progress.end(last > CURVED_GROWTH * first, Status.NEGATIVE_CURVATURE)


def begin(
    matvec: Matvec, vector: Vector, start: Vector | None, num_tasks: int | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], Truth]:
    """Return a first solution, its residual, and by system whether it is the start, which costs a product.

    Example:
        >>> import torch
        >>> matvec = lambda u: [2.0 * u[0]]
        >>> begin(matvec, [torch.ones(2)], [torch.tensor([0.5, 0.4])], None)
        ([tensor([0.5000, 0.4000])], [tensor([0.0000, 0.2000])], True)
    """
    if start is None:
        return zeros(vector), list(vector), known(False, num_tasks)
    residual = add(vector, matvec(start), -1.0)
    # One that is worse than zero is no start; nor is one with a NaN, which is not less.
    squared, of_zero = (measured(dot(each, each, num_tasks)) for each in (residual, vector))
    helps = squared < of_zero
    return choose(helps, start, zeros(vector)), choose(helps, residual, vector), helps


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
        is_warm: by system, whether it begins at the start that was given.
        num_products: products with A so far.

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.solvers import ConjugateGradient
        >>> system = begin_system(
        ...     ConjugateGradient(), 1e-6, 0.5, lambda u: [2.0 * u[0]], [torch.ones(2)], start=None, view=None
        ... )
        >>> system.matvec([torch.ones(2)]), system.size
        ([tensor([2.5000, 2.5000])], 2.0)
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
    is_warm: Truth
    num_products: int | Tensor


def check_krylov(solver: AbstractSolver, max_iterations: int, tolerance: float, damping: float) -> None:
    """Refuse settings that are of a wrong kind or out of range.

    Raises:
        ConfigError: they are.

    Example:
        >>> from mlotool.hypergradient.solvers import ConjugateGradient
        >>> check_krylov(ConjugateGradient(), max_iterations=10, tolerance=1e-6, damping=0.0)
    """
    require_fields("hypergradient.solver", solver, names_class=True)
    if max_iterations < 1 or not tolerance >= 0 or not damping >= 0:
        raise ConfigError(
            f"{type(solver).__name__}: found max_iterations={max_iterations}, tolerance={tolerance}, "
            f"damping={damping}; expected a whole max_iterations >= 1, tolerance >= 0 and damping >= 0. "
            "Correct hypergradient.solver."
        )


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

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.solvers import ConjugateGradient
        >>> begin_system(
        ...     ConjugateGradient(), 1e-6, 0.0, lambda u: u, [torch.zeros(2)], start=None, view=None
        ... ).status.value
        'converged'
    """
    num_tasks = tasks_of(view)

    def damped(direction: Vector) -> Vector:
        product = matvec(direction)
        return add(product, direction, damping) if damping else product

    def inner(a: Vector, b: Vector) -> Number:
        return measured(dot(a, b, num_tasks))

    progress, nothing = Progress(num_tasks), zeros(vector)
    size = inner(vector, vector)
    if (result := solve_in_range(solver, size, matvec, vector, start, view)) is not None:
        return result
    progress.end_unsound(size)
    progress.end(size == 0, Status.CONVERGED)
    if not progress.is_running:
        return progress.result(nothing, 0, relative(size, size))
    vector = choose(progress.running, vector, nothing)
    num_products = 0 if start is None else progress.one
    solution, residual, is_warm = begin(damped, vector, start, num_tasks)
    squared = inner(residual, residual)
    # Below eps nothing but rounding is left, and a further step would divide by it.
    eps = torch.finfo(vector[0].dtype).eps
    target = max(tolerance, eps) ** 2 * size
    progress.end(squared <= target, Status.CONVERGED)
    return LinearSystem(
        damped, inner, progress, size, eps, target, nothing, vector, solution, residual, squared, is_warm, num_products
    )


_MAX_EXPONENT = 120
"""Beyond it the inverse of a power of two leaves float32."""


def solve_in_range(
    solver: AbstractSolver,
    size: Number,
    matvec: Matvec,
    vector: Vector,
    start: Vector | None,
    view: LowerView | None,
) -> SolveResult | None:
    """Return the solution by way of `H (q / c) = v / c`, c a power of two; None where v is as it should be.

    Else a vector of length 1e-23 has the squared norm 0 in float32, and would seem to be solved by zero.

    Args:
        solver: solves.
        size: by system, the squared norm of v.
        matvec: `u -> H u`.
        vector: v.
        start: as for `AbstractSolver.solve`.
        view: as for `AbstractSolver.solve`.

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.solvers import ConjugateGradient
        >>> vector, matvec = [torch.full((2,), 1e-30)], lambda u: [2.0 * u[0]]
        >>> solve_in_range(ConjugateGradient(), 2e-60, matvec, vector, None, None).solution
        [tensor([5.0000e-31, 5.0000e-31])]
        >>> solve_in_range(ConjugateGradient(), 2.0, matvec, [torch.ones(2)], None, None) is None
        True
    """
    is_out = (size < 1e-24) | negated(size < 1e24)
    if is_joint() and isinstance(is_out, Tensor):
        # The run of which this is so takes the step by its own plan.
        assume(~is_out.any())
        return None
    if not holds_anywhere(is_out):
        return None
    factor = _powers_of_two(vector, tasks_of(view))
    if holds_everywhere(factor == 1):
        return None
    start = None if start is None else scaled(start, 1.0 / factor)
    result = solver.solve(matvec, scaled(vector, 1.0 / factor), start=start, view=view)
    return replace(result, solution=scaled(result.solution, factor))


def _powers_of_two(vector: Vector, num_tasks: int | None) -> Number:
    """Return by system the power of two near the largest entry; division by it is exact."""
    filled = [tensor.detach().abs().reshape(num_tasks or 1, -1).amax(1) for tensor in vector if tensor.numel()]
    peaks = torch.stack(filled).amax(0).cpu().double()
    is_usable = peaks.isfinite() & (peaks > 0)
    exponents = torch.where(is_usable, peaks, 1.0).log2().round()
    powers = torch.exp2(exponents.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))
    return float(powers[0]) if num_tasks is None else powers
