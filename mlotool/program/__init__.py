"""Problems, the graph between them, their gradients and their schedule; plain torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.problem.interface import AbstractHypergradient, AbstractStepwise, LowerProblem, LowerView
    from mlotool.problem.problem import Problem
    from mlotool.problem.settings import ProblemNode
    from mlotool.problem.stream import SameBatch, Stream
    from mlotool.program.gradient_plan import StepResult
    from mlotool.program.graph import Graph
    from mlotool.program.program import Program
    from mlotool.program.schedule import Schedule

__all__ = ["AbstractHypergradient", "AbstractStepwise", "Graph", "LowerProblem", "LowerView", "Problem", "ProblemNode"]
__all__ += ["Program", "SameBatch", "Schedule", "StepResult", "Stream"]

_HOMES = {
    "problem.interface": ("AbstractHypergradient", "AbstractStepwise", "LowerProblem", "LowerView"),
    "problem.stream": ("SameBatch", "Stream"),
    "problem.settings": ("ProblemNode",),
    "problem.problem": ("Problem",),
    "program.gradient_plan": ("StepResult",),
}


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): a graph is checked and drawn where torch must not be imported.
    if name in __all__:
        home = next((home for home, names in _HOMES.items() if name in names), f"program.{name.lower()}")
        return getattr(import_module(f"mlotool.{home}"), name)
    raise AttributeError(f"module 'mlotool.program' has no attribute '{name}'")
