"""How gradients pass through a solution: implicit differentiation, its solvers and products; plain torch."""

from typing import TYPE_CHECKING, Any

from mlotool.core.settings import discover
from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status
from mlotool.problem.trajectory import AbstractStepStore

_targets = discover(__name__, "solvers")
globals().update(_targets)
__all__ = ["AbstractSolver", "AbstractStepStore", "SolveResult", "Status", *_targets]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
