"""Which steps of a problem are simulated where none were recorded."""

from collections.abc import Iterable, Mapping
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.problem.problem import Problem
from mlotool.program.algorithms import algorithm_of


def simulated_batches(problem: Problem, given: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the batches of each step.

    Args:
        problem: the problem.
        given: a list of the steps' batches, `accumulate_batches` for each, or one batch for all; None takes the last
            one of its stream.

    Raises:
        ConfigError: the list does not fit.
    """
    # A list is one of batches; a tuple may be a batch.
    if not isinstance(given, list):
        batch = problem.stream.last() if given is None and problem.stream is not None else given
        return ((batch,),) * problem.settings.unroll_steps
    count = problem.settings.accumulate_batches
    if not given or len(given) % count:
        raise ConfigError(
            f"batches: found a list of {len(given)} for '{problem.name}' with accumulate_batches={count}; expected "
            f"{count} for each step, so a multiple of {count}. Give the batches of the steps one after the other."
        )
    return tuple(tuple(given[start : start + count]) for start in range(0, len(given), count))


def check_simulation(problem: Problem, below: Iterable[Problem], batches: Mapping[str, Any]) -> None:
    """Refuse several steps of which each changes a solution that it reads, but not its value.

    Args:
        problem: whose steps they are.
        below: those that it both shapes and reads.
        batches: that are given, by problem.

    Raises:
        ConfigError: one of these is not simulated as well.
    """
    for lower in below:
        if not algorithm_of(lower).sees_steps or (lower.name not in batches and len(lower.trajectory)):
            raise ConfigError(
                f"batches: found several steps of '{problem.name}' to simulate, each of which reads the solution of "
                f"'{lower.name}', which would have to follow the steps, but is at hand for the parameters as they are "
                f"alone; expected one step, or a list of batches for '{lower.name}' as well, with Unrolled. Take the "
                "steps by Schedule.tick() to differentiate them as they were."
            )
