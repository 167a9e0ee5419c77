"""Solvers of `H q = v`, one a file."""

from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status
from mlotool.hypergradient.solvers.conjugate_gradient import ConjugateGradient
from mlotool.hypergradient.solvers.exact import Exact
from mlotool.hypergradient.solvers.identity import Identity
from mlotool.hypergradient.solvers.neumann import Neumann

__all__ = ["AbstractSolver", "ConjugateGradient", "Exact", "Identity", "Neumann", "SolveResult", "Status"]
