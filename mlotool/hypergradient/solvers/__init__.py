"""Solvers of `H q = v`, one a file."""

from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status
from mlotool.hypergradient.solvers.conjugate_gradient import ConjugateGradient, NormalEquationConjugateGradient
from mlotool.hypergradient.solvers.exact import Exact
from mlotool.hypergradient.solvers.fixed_point import FixedPoint
from mlotool.hypergradient.solvers.identity import Identity
from mlotool.hypergradient.solvers.kfac import KFAC
from mlotool.hypergradient.solvers.neumann import Neumann
from mlotool.hypergradient.solvers.nystrom import Nystrom
from mlotool.hypergradient.solvers.optimizer_preconditioner import OptimizerPreconditioner

__all__ = [
    "KFAC",
    "AbstractSolver",
    "ConjugateGradient",
    "Exact",
    "FixedPoint",
    "Identity",
    "Neumann",
    "NormalEquationConjugateGradient",
    "Nystrom",
    "OptimizerPreconditioner",
    "SolveResult",
    "Status",
]
