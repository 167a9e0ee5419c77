"""How other problems shape a problem's steps: their start, and the hyperparameters of its optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.program.problem import Problem
from mlotool.program.update import Settings, spread

Scope = Mapping[str, Mapping[str, Tensor]]
"""By problem, the tensors that take its parameters' places; those that are missing keep the current ones."""


def start_of(problem: Problem, problems: Mapping[str, Problem], scope: Scope) -> tuple[Tensor, ...]:
    """Return the parameters of the problem that `problem` is reset to, once for each of its tasks."""
    source = problems[str(problem.reset_to)]
    tensors = scope.get(source.name) or source.constants()
    for key, tensor in problem.theta.items():
        shape = tensor.shape if problem.tasks is None else tensor.shape[1:]
        if key not in tensors or tensors[key].shape != shape:
            there = f"of shape {tuple(tensors[key].shape)}" if key in tensors else "not there"
            raise ConfigError(
                f"problems.{problem.name}.reset_to: found '{source.name}', in whose module the parameter '{key}' is "
                f"{there}; expected one of shape {tuple(shape)}, as '{problem.name}' has it. Give both problems the "
                "same module, or write reset_to: initial."
            )
    if problem.tasks is None:
        return tuple(tensors[key] for key in problem.theta)
    return tuple(tensors[key].expand(problem.tasks, *tensors[key].shape) for key in problem.theta)


def learned_settings(
    problem: Problem, problems: Mapping[str, Problem], settings: Sequence[Settings], scope: Scope
) -> tuple[Settings, ...]:
    """Return the hyperparameters of a problem's optimizer with those values that other problems give."""
    if not problem.optimizer_roles:
        return tuple(settings)
    given: dict[str, Sequence[Any]] = {}
    for key, name in problem.optimizer_roles.items():
        other = problems[name]
        tensors = scope.get(name) or other.constants()
        try:
            value = BoundModule(other.module, tensors, places=other.places)()
        except TypeError as error:
            raise ConfigError(
                f"problems.{problem.name}.optimizer.{key}: the module of '{name}' cannot be called without arguments "
                f"({error}); expected one that gives numbers, such as mlotool.models.PositiveVector. Correct it."
            ) from error
        given[key] = spread(f"problems.{problem.name}.optimizer.{key}", value, problem.theta)
    return tuple(
        {**each, **{key: values[index] for key, values in given.items()}} for index, each in enumerate(settings)
    )
