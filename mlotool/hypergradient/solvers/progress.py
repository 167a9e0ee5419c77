"""Which of the systems that are solved side by side still run, and how the others ended."""

import math
from collections.abc import Sequence

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mlotool.core.tracing import decided, is_tracing
from mlotool.hypergradient.solvers.base import Matvec, SolveResult, Status
from mlotool.hypergradient.solvers.numbers import (
    Number,
    Truth,
    count_if,
    divided,
    holds_everywhere,
    is_finite,
    known,
    may_hold,
    measured,
    negated,
    where,
)
from mlotool.hypergradient.vector import add, choose, dot, norm, scaled, zeros
from mlotool.problem.interface import Vector

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
