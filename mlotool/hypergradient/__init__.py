"""How gradients pass through a solution: implicit differentiation, its solvers and products; plain torch."""

from mlotool.hypergradient.first_order import FirstOrder
from mlotool.hypergradient.implicit import Implicit
from mlotool.hypergradient.solvers import (
    AbstractSolver,
    ConjugateGradient,
    Exact,
    Identity,
    Neumann,
    SolveResult,
    Status,
)

__all__ = [
    "AbstractSolver",
    "ConjugateGradient",
    "Exact",
    "FirstOrder",
    "Identity",
    "Implicit",
    "Neumann",
    "SolveResult",
    "Status",
]
