"""What the solvers by conjugate gradients share: their settings' ranges, and how a solve begins."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.arguments import require_fields
from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status, tasks_of
from mlotool.hypergradient.solvers.numbers import Number, Truth, measured
from mlotool.hypergradient.solvers.progress import Progress, begin, relative
from mlotool.hypergradient.solvers.scale import solve_in_range
from mlotool.hypergradient.vector import add, choose, dot, zeros
from mlotool.problem.interface import LowerView, Vector


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
