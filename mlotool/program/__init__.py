"""Problems, the graph between them, their gradients and their schedule; plain torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.problem.interface import (
        AbstractDirector,
        AbstractHypergradient,
        AbstractStepwise,
        AbstractZerothOrder,
        LowerProblem,
        LowerView,
    )
    from mlotool.problem.problem import Problem
    from mlotool.problem.settings import ProblemNode
    from mlotool.problem.streams.stream import SameBatch, Stream
    from mlotool.program.gradient_plan import StepResult
    from mlotool.program.graph import Graph
    from mlotool.program.program import Program
    from mlotool.program.schedule import Schedule

__all__ = ["AbstractDirector", "AbstractHypergradient", "AbstractStepwise", "AbstractZerothOrder", "Graph"]
__all__ += ["LowerProblem", "LowerView", "Problem", "ProblemNode", "Program", "SameBatch", "Schedule", "StepResult"]
__all__ += ["Stream"]

_HOMES = {
    "problem.interface": (*(name for name in __all__ if name.startswith("Abstract")), "LowerProblem", "LowerView"),
    "problem.streams.stream": ("SameBatch", "Stream"),
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
