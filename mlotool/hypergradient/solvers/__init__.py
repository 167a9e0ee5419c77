"""Solvers of `H q = v`, one a file."""

from mlotool.hypergradient.solvers.base import AbstractSolver as AbstractSolver
from mlotool.hypergradient.solvers.base import SolveResult as SolveResult
from mlotool.hypergradient.solvers.base import Status as Status
from mlotool.hypergradient.solvers.conjugate_gradient import ConjugateGradient as ConjugateGradient
from mlotool.hypergradient.solvers.conjugate_gradient import (
    NormalEquationConjugateGradient as NormalEquationConjugateGradient,
)
from mlotool.hypergradient.solvers.exact import Exact as Exact
from mlotool.hypergradient.solvers.fixed_point import FixedPoint as FixedPoint
from mlotool.hypergradient.solvers.identity import Identity as Identity
from mlotool.hypergradient.solvers.kfac import KFAC as KFAC
from mlotool.hypergradient.solvers.neumann import Neumann as Neumann
from mlotool.hypergradient.solvers.nystrom import Nystrom as Nystrom
from mlotool.hypergradient.solvers.optimizer_preconditioner import OptimizerPreconditioner as OptimizerPreconditioner
