"""Systems whose right-hand side is so small or so large that squares of its entries leave their type's range."""

from dataclasses import replace

import torch
from torch import Tensor

from mlotool.core.tracing import assume, is_joint
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, tasks_of
from mlotool.hypergradient.solvers.numbers import Number, holds_anywhere, holds_everywhere, negated
from mlotool.hypergradient.vector import scaled
from mlotool.problem.interface import LowerView, Vector

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
