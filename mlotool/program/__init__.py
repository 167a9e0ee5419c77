"""Problems, the graph between them, their gradients and their schedule; plain torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.program.differentiation import AbstractHypergradient, LowerProblem, LowerView
    from mlotool.program.graph import Graph, ProblemNode
    from mlotool.program.problem import Problem
    from mlotool.program.program import Program
    from mlotool.program.schedule import Schedule, StepResult
    from mlotool.program.stream import Stream

_HOME_OF = {
    "AbstractHypergradient": "differentiation",
    "Graph": "graph",
    "LowerProblem": "differentiation",
    "LowerView": "differentiation",
    "Problem": "problem",
    "ProblemNode": "graph",
    "Program": "program",
    "Schedule": "schedule",
    "StepResult": "schedule",
    "Stream": "stream",
}
__all__ = [
    "AbstractHypergradient",
    "Graph",
    "LowerProblem",
    "LowerView",
    "Problem",
    "ProblemNode",
    "Program",
    "Schedule",
    "StepResult",
    "Stream",
]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): a graph is checked and drawn where torch must not be imported.
    if name in _HOME_OF:
        return getattr(import_module(f"mlotool.program.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'mlotool.program' has no attribute '{name}'")
