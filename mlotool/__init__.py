"""mlotool: declarative gradient-based multilevel optimization."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.config import compose
    from mlotool.core import BoundModule, ConfigError, LossOutput, MlotoolError, RunError, remat, stop_gradient
    from mlotool.fitting import fit
    from mlotool.hypergradient.evolution import EvolutionStrategies
    from mlotool.hypergradient.first_order import FirstOrder
    from mlotool.hypergradient.implicit import Implicit
    from mlotool.hypergradient.penalty import Penalty
    from mlotool.hypergradient.saba import SABA
    from mlotool.hypergradient.solvers.conjugate_gradient import ConjugateGradient, NormalEquationConjugateGradient
    from mlotool.hypergradient.solvers.exact import Exact
    from mlotool.hypergradient.solvers.fixed_point import FixedPoint
    from mlotool.hypergradient.solvers.identity import Identity
    from mlotool.hypergradient.solvers.kfac import KFAC
    from mlotool.hypergradient.solvers.neumann import Neumann
    from mlotool.hypergradient.solvers.nystrom import Nystrom
    from mlotool.hypergradient.solvers.optimizer_preconditioner import OptimizerPreconditioner
    from mlotool.hypergradient.unrolled import Unrolled
    from mlotool.program import Graph, Problem, Program, SameBatch, Schedule, Stream
    from mlotool.runner import RunResult, load, run

__version__ = "0.1.0"

_HOMES = {
    "mlotool.config": ("compose",),
    "mlotool.core": ("BoundModule", "ConfigError", "LossOutput", "MlotoolError", "RunError", "remat", "stop_gradient"),
    "mlotool.fitting": ("fit",),
    "mlotool.hypergradient": (
        "KFAC",
        "ConjugateGradient",
        "Exact",
        "FirstOrder",
        "FixedPoint",
        "Identity",
        "Implicit",
        "Neumann",
        "NormalEquationConjugateGradient",
        "Nystrom",
        "OptimizerPreconditioner",
        "EvolutionStrategies",
        "Penalty",
        "SABA",
        "Unrolled",
    ),
    "mlotool.program": ("Graph", "Problem", "Program", "SameBatch", "Schedule", "Stream"),
    "mlotool.runner": ("RunResult", "load", "run"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["KFAC", "SABA", "BoundModule", "ConfigError", "ConjugateGradient", "EvolutionStrategies", "Exact"]
__all__ += ["FirstOrder", "FixedPoint", "Graph", "Identity", "Implicit", "LossOutput", "MlotoolError", "Neumann"]
__all__ += ["NormalEquationConjugateGradient", "Nystrom", "OptimizerPreconditioner", "Penalty", "Problem", "Program"]
__all__ += [
    "RunError",
    "RunResult",
    "SameBatch",
    "Schedule",
    "Stream",
    "Unrolled",
    "__version__",
    "compose",
    "fit",
    "load",
]
__all__ += ["remat", "run", "stop_gradient"]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562), so that the command line starts without torch.
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'mlotool' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
