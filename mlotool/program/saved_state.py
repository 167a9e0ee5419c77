"""What a program saves and reports: the state of its problems, and what their algorithms keep."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.core.plain_state import ADVICE, Plain, check_plain
from mlotool.problem.arguments import check_saving
from mlotool.problem.problem import Problem
from mlotool.problem.saved_form import check_whole
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


def check_saved(problems: Iterable[Problem]) -> None:
    """Refuse problems whose state a checkpoint cannot hold, or that do not take it back.

    Raises:
        ConfigError: with the module, optimizer or scheduler, and the place in its state.
    """
    plain = Plain(before_run=True)
    for problem in problems:
        check_saving(problem.name, problem.module)
        state = {"module": problem.module.state_dict(), **problem.optimizer_step.state_dict()}
        check_plain({problem.name: state}, ConfigError, plain=plain)


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
            f"A saved program has the problems {sorted(map(str, state))}; expected {sorted(problems)}. "
            "Load it with the recipe it was saved by."
        )
    for name, problem in problems.items():
        check_whole(f"state.{name}", state[name], problem, problems)
    streams = {name: problem.stream for name, problem in problems.items()}
    with _told():
        kept = {name: memories.loaded(name, state[name].get("hypergradient"), problems) for name in problems}
        for name, problem in problems.items():
            problem.load_state_dict(state[name], streams)
            memories.by_name[name].value = kept[name]


@contextmanager
def _told() -> Iterator[None]:
    """Turn what a user's module, optimizer or algorithm says of its state into one message."""
    try:
        yield
    except MlotoolError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"state: found one that does not fit ({type(error).__name__}: {reason}); expected that of the same "
            f"program. {ADVICE}"
        ) from error
