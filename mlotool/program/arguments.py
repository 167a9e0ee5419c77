"""Arguments of a program, checked where it is made."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.problem.arguments import check_kept, check_owners, check_shared
from mlotool.problem.problem import Problem
from mlotool.program.backends import BACKENDS
from mlotool.program.graph import Graph


def check_program(problems: Any, graph: Any, reduce: Any, trace: Any) -> dict[str, Problem]:
    """Refuse arguments of a program that are of a wrong kind or do not fit each other; return the problems by name.

    Raises:
        ConfigError: they are, or do not.
    """
    advice = "Write Program([lower, upper], graph)."
    if isinstance(problems, Problem):
        advice = "Write Program([problem], graph)."
    elif isinstance(problems, Mapping):
        advice = "Write Program(problems.values(), graph)."
    require(isinstance(problems, Iterable), "Program.problems", problems, "a list of problems", advice)
    found = list(problems)
    require(bool(found), "Program.problems", problems, "a list of at least one problem", advice)
    for each in found:
        require(isinstance(each, Problem), "Program.problems", problems, "a list of problems", advice)
    advice = "Write Graph(), or Graph({'upper': ['lower']}, {'lower': ['upper']})."
    require(isinstance(graph, Graph), "Program.graph", graph, "a Graph", advice)
    require(reduce is None or callable(reduce), "Program.reduce", reduce, "a function of a list of tensors, or null")
    _check_trace(trace)
    by_name = {problem.name: problem for problem in found}
    if len(by_name) < len(found):
        names = [problem.name for problem in found]
        raise ConfigError(f"problems: found the names {names}; expected each once. Rename one of the problems.")
    graph.validate({name: problem.node for name, problem in by_name.items()})
    check_owners({name: problem.module for name, problem in by_name.items()})
    for problem in found:
        check_kept(problem.name, problem.module, problem.theta)
    check_shared("parallel", {each.name: each.parallel for each in found})
    return by_name


def _check_trace(trace: Any) -> None:
    """Refuse a way of tracing that there is not, or not on this machine."""
    require(trace in (None, *BACKENDS), "trace", trace, f"None or one of {', '.join(BACKENDS)}", "Correct trace.")
    if trace == "cuda_graph" and not torch.cuda.is_available():
        raise ConfigError(
            "trace: found 'cuda_graph', and torch finds no CUDA device; expected one. Write runner.trace=inductor."
        )
