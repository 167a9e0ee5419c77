"""How exact a pullback is: the residual of its solve, and its cosine to a converged one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlotool.hypergradient.products import ReverseProduct
from mlotool.hypergradient.solvers import ConjugateGradient, Exact, NormalEquationConjugateGradient, SolveResult, Status
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, Start, View, tasks_of
from mlotool.hypergradient.vector import add, dot, norm
from mlotool.problem.interface import LowerView, Vector

# Up to here, of each task, the reference is the dense solve.
MAX_DENSE_PARAMETERS = 2000

# Of the reference's conjugate gradients beyond.
MAX_ITERATIONS = 500


@dataclass(frozen=True)
class Quality:
    """What a report says.

    Args:
        residual: `norm(H q - v) / norm(v)`; the largest over tasks.
        cosine: between the pullback's result, over all inputs together, and that of a converged solve; 0 where one of
            them alone is zero.

    Example:
        >>> Quality(residual=0.1, cosine=0.98).cosine
        0.98
    """

    residual: float
    cosine: float


def assess(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    vector: Vector,
    solution: Vector,
    found: Vector,
) -> Quality:
    """Compare a pullback with a converged one, by reverse products.

    Args:
        view: the loss; it is evaluated once.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        vector: v, the mean over ranks.
        solution: q.
        found: the cotangents of the wanted inputs.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> vector, half = [torch.ones(1)], [torch.tensor([0.5])]
        >>> assess(view, theta, inputs, [True], vector, solution=half, found=[torch.ones(1)])
        Quality(residual=0.0, cosine=1.0)
    """
    product, num_tasks = ReverseProduct(view, theta, inputs, wanted), view.problem.num_tasks
    lengths = norm(vector, num_tasks)
    errors = norm(add(product.hessian(solution), vector, -1.0), num_tasks)
    residual = torch.where(errors == 0, 0.0, errors / lengths)
    reference = list(torch._foreach_neg(product.cross(Converged().solve(product.hessian, vector, view=view).solution)))
    return Quality(float(residual.max()), _cosine(found, reference))


@dataclass(frozen=True)
class Converged(AbstractSolver):
    """The most exact solve that fits: dense, else conjugate gradients; on the normal equations for an indefinite H.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> Converged().solve(lambda u: [2.0 * u[0]], [torch.ones(1)], view=view).solution
        [tensor([0.5000])]
    """

    failures = {**ConjugateGradient.failures, **Exact.failures}  # noqa: RUF012

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the solution, and how it ended."""
        size = sum(tensor.numel() for tensor in vector) // (tasks_of(view) or 1)
        if size <= MAX_DENSE_PARAMETERS:
            return Exact(max_parameters=MAX_DENSE_PARAMETERS).solve(matvec, vector, view=view)
        settings = MAX_ITERATIONS, torch.finfo(vector[0].dtype).eps ** 0.75
        result = ConjugateGradient(*settings).solve(matvec, vector, view=view)
        if result.status is Status.NEGATIVE_CURVATURE:
            result = NormalEquationConjugateGradient(*settings).solve(matvec, vector, view=view)
        return result


def _cosine(a: Vector, b: Vector) -> float:
    lengths = float(norm(a)), float(norm(b))
    if not all(lengths):
        return float(lengths[0] == lengths[1])
    # In two steps: the product of small lengths underflows.
    return float(dot(torch._foreach_div(list(a), lengths[0]), torch._foreach_div(list(b), lengths[1])))
