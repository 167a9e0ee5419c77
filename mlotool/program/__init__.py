"""Problems, the graph between them, their gradients and their schedule; plain torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.problem.interface import AbstractHypergradient, LowerProblem, LowerView
    from mlotool.problem.problem import Problem
    from mlotool.problem.settings import ProblemNode
    from mlotool.problem.stream import SameBatch, Stream
    from mlotool.program.graph import Graph
    from mlotool.program.prepared_step import StepResult
    from mlotool.program.program import Program
    from mlotool.program.schedule import Schedule

_HOME_OF = {
    "AbstractHypergradient": "problem.interface",
    "Graph": "program.graph",
    "LowerProblem": "problem.interface",
    "LowerView": "problem.interface",
    "Problem": "problem.problem",
    "ProblemNode": "problem.node",
    "Program": "program.program",
    "SameBatch": "problem.stream",
    "Schedule": "program.schedule",
    "StepResult": "program.prepared_step",
    "Stream": "problem.stream",
}
__all__ = [
    "AbstractHypergradient",
    "Graph",
    "LowerProblem",
    "LowerView",
    "Problem",
    "ProblemNode",
    "Program",
    "SameBatch",
    "Schedule",
    "StepResult",
    "Stream",
]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): a graph is checked and drawn where torch must not be imported.
    if name in _HOME_OF:
        return getattr(import_module(f"mlotool.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'mlotool.program' has no attribute '{name}'")
