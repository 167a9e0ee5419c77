"""How gradients pass through a solution: implicit differentiation, its solvers and products; plain torch."""

from mlotool.core.settings import discover
from mlotool.hypergradient.evolution import EvolutionStrategies as EvolutionStrategies
from mlotool.hypergradient.first_order import FirstOrder as FirstOrder
from mlotool.hypergradient.implicit import Implicit as Implicit
from mlotool.hypergradient.penalty import Penalty as Penalty
from mlotool.hypergradient.saba import SABA as SABA
from mlotool.hypergradient.solvers import *  # noqa: F403
from mlotool.hypergradient.unrolled import Unrolled as Unrolled
from mlotool.problem.trajectory import AbstractStepStore as AbstractStepStore
from mlotool.problem.trajectory import Binomial as Binomial
from mlotool.problem.trajectory import KeepAll as KeepAll
from mlotool.problem.trajectory import KeepEvery as KeepEvery

_targets = discover(__name__, "solvers")
globals().update(_targets)
__all__ = ["AbstractSolver", "AbstractStepStore", "SolveResult", "Status", *_targets]  # noqa: F405
