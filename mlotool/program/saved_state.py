"""What a program saves and reports: the state of its problems, and what their algorithms keep."""

from collections.abc import Mapping
from typing import Any

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.problem.problem import Problem
from mlotool.problem.usable import check_state
from mlotool.program.memories import Memories


def statistics(problems: Mapping[str, Problem], memories: Memories) -> dict[str, float]:
    """Return what hypergradients and layer-parallel steps report about their last use, as `<problem>/<name>`."""
    found = {}
    for name, problem in problems.items():
        values = memories.statistics(name)
        if problem.parallel is not None:
            values |= problem.parallel.statistics()
        found.update({f"{name}/{key}": value for key, value in values.items()})
    return found


def state_dict(problems: Mapping[str, Problem], memories: Memories) -> dict[str, Any]:
    """Return the state of all problems, in plain containers."""
    return {
        name: {**problem.state_dict(), "hypergradient": memories.state_dict(name)} for name, problem in problems.items()
    }


def load_state_dict(problems: Mapping[str, Problem], memories: Memories, state: Mapping[str, Any]) -> None:
    """Take the state back.

    Raises:
        ConfigError: it is that of other problems, or does not fit their modules or optimizers; nothing is changed then.
    """
    require(isinstance(state, Mapping), "state", state, "what state_dict() has returned", "Give that.")
    if set(state) != set(problems):
        raise ConfigError(
            f"A saved program has the problems {sorted(state)}; expected {sorted(problems)}. "
            "Load it with the recipe it was saved by."
        )
    streams = {name: problem.stream for name, problem in problems.items()}
    for name, problem in problems.items():
        check_state(name, state[name], problem.module, problem.optimizer, is_whole=problem.shards is None)
    for name, problem in problems.items():
        problem.load_state_dict(state[name], streams)
        memories.load_state_dict(name, state[name]["hypergradient"])
