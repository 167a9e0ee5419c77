"""How gradients pass through a solution: implicit differentiation, its solvers and products; plain torch."""

from mlotool.core.settings import discover
from mlotool.hypergradient.evolution import EvolutionStrategies
from mlotool.hypergradient.first_order import FirstOrder
from mlotool.hypergradient.implicit import Implicit
from mlotool.hypergradient.penalty import Penalty
from mlotool.hypergradient.saba import SABA
from mlotool.hypergradient.solvers import (
    KFAC,
    AbstractSolver,
    ConjugateGradient,
    Exact,
    FixedPoint,
    Identity,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
    OptimizerPreconditioner,
    SolveResult,
    Status,
)
from mlotool.hypergradient.unrolled import Unrolled
from mlotool.problem.trajectory import AbstractStepStore, Binomial, KeepAll, KeepEvery

_targets = discover(__name__, "solvers")
globals().update(_targets)
__all__ = [
    "KFAC",
    "SABA",
    "AbstractSolver",
    "AbstractStepStore",
    "Binomial",
    "ConjugateGradient",
    "EvolutionStrategies",
    "Exact",
    "FirstOrder",
    "FixedPoint",
    "Identity",
    "Implicit",
    "KeepAll",
    "KeepEvery",
    "Neumann",
    "NormalEquationConjugateGradient",
    "Nystrom",
    "OptimizerPreconditioner",
    "Penalty",
    "SolveResult",
    "Status",
    "Unrolled",
]
__all__ += [name for name in _targets if name not in __all__]
