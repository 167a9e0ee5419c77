"""How other problems shape a problem's steps: their start, and the hyperparameters of its optimizer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.program.loss_plan import Values

if TYPE_CHECKING:
    from mlotool.program.engine import Engine


def start_of(problem: Problem, engine: "Engine", values: Values) -> tuple[Tensor, ...]:
    """Return the parameters of the problem that `problem` is reset to, once for each of its tasks."""
    number = engine.numbers[str(problem.settings.reset_to)]
    source, given = engine.problems[number], values[number]
    tensors = dict(zip(source.theta, source.current() if given is None else given, strict=True))
    for key, tensor in problem.theta.items():
        shape = tensor.shape if problem.settings.tasks is None else tensor.shape[1:]
        if key not in tensors or tensors[key].shape != shape:
            there = f"of shape {tuple(tensors[key].shape)}" if key in tensors else "not there"
            raise ConfigError(
                f"problems.{problem.name}.reset_to: found '{source.name}', in whose module the parameter '{key}' is "
                f"{there}; expected one of shape {tuple(shape)}, as '{problem.name}' has it. Give both problems the "
                "same module, or write reset_to: initial."
            )
    if problem.settings.tasks is None:
        return tuple(tensors[key] for key in problem.theta)
    return tuple(tensors[key].expand(problem.settings.tasks, *tensors[key].shape) for key in problem.theta)


def learned_hyperparameters(
    problem: Problem, engine: "Engine", hyperparameters: Sequence[Hyperparameters], values: Values
) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a problem's optimizer with those values that other problems give."""
    if not problem.settings.optimizer_roles:
        return tuple(hyperparameters)
    given: dict[str, Sequence[Any]] = {}
    for key, name in problem.settings.optimizer_roles.items():
        number = engine.numbers[name]
        try:
            value = engine.problems[number].pure(values[number], None)()
        except TypeError as error:
            raise ConfigError(
                f"problems.{problem.name}.optimizer.{key}: the module of '{name}' cannot be called without arguments "
                f"({error}); expected one that gives numbers, such as mlotool.models.PositiveVector. Correct it."
            ) from error
        given[key] = _spread(f"problems.{problem.name}.optimizer.{key}", value, problem.theta)
    return tuple(
        {**each, **{key: values[index] for key, values in given.items()}} for index, each in enumerate(hyperparameters)
    )


def _spread(key: str, value: Any, theta: Mapping[str, Tensor]) -> list[Any]:
    """Return a hyperparameter for each parameter of `theta`.

    Args:
        key: where it is set, for messages.
        value: a tensor of one element; a 1-D tensor with one element a parameter; or tensors by parameter name that
            broadcast to the parameter.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, Mapping) and set(value) == set(theta):
        return [value[name] for name in theta]
    if isinstance(value, Tensor) and value.numel() == 1:
        return [value.reshape(())] * len(theta)
    if isinstance(value, Tensor) and value.shape == (len(theta),):
        return list(value)
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"[:200]
    raise ConfigError(
        f"{key}: its problem's module gives {found}; expected one value, {len(theta)} values (one a parameter), or a "
        f"mapping with the keys {', '.join(theta)}. Correct the module's size, or what its forward returns."
    )
