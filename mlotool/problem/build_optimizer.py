"""The optimizer and the scheduler of a problem, built and checked."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.errors import ConfigError
from mlotool.problem.arguments import check_scheduler, made
from mlotool.problem.optimizer_step import OptimizerStep
from mlotool.problem.settings import ProblemSettings

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def optimizer_step(
    name: str,
    theta: Mapping[str, Tensor],
    optimizer: Optimizer | OptimizerFactory | None,
    scheduler: Callable[[Optimizer], Any] | None,
    settings: ProblemSettings,
) -> OptimizerStep:
    """Return how a problem steps.

    Args:
        name: the problem.
        theta: its parameters by name.
        optimizer: of them, or what makes one; None where it is never stepped.
        scheduler: makes one of the optimizer; None keeps its learning rate.
        settings: the problem's.

    Raises:
        ConfigError: the optimizer or the scheduler is of a wrong kind, or does not fit the settings.
    """
    key = f"problems.{name}"
    for user, is_set in (("a scheduler", scheduler is not None), ("reset_to", settings.reset_to is not None)):
        _require(optimizer is not None or not is_set, f"{key}.optimizer", None, f"an optimizer, since {user} is set")
    built: Optimizer | None
    if optimizer is None or isinstance(optimizer, Optimizer):
        built = optimizer
    else:
        parameters, expected = theta.values(), "a torch optimizer"
        built = made(f"{key}.optimizer", optimizer, parameters, lambda each: isinstance(each, Optimizer), expected)
    _check_held(name, built, theta)
    _check_groups(name, built)
    found = None
    if scheduler is not None:
        expected = "a scheduler"
        found = made(f"{key}.scheduler", scheduler, built, lambda each: each is None or hasattr(each, "step"), expected)
    check_scheduler(name, found, built, settings.scheduler_interval)
    if settings.optimizer_roles:
        assert built is not None
        group = built.param_groups[0].items()
        known = [each for each, value in group if isinstance(value, int | float) and not isinstance(value, bool)]
        for each in settings.optimizer_roles:
            _require(each in known, f"{key}.optimizer.{each}", "a problem", f"one of {', '.join(known)}")
    return OptimizerStep(name, built, found, settings)


def _check_held(name: str, optimizer: Optimizer | None, theta: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that was built on other parameters: it would step them, or nothing."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [key for key, tensor in theta.items() if id(tensor) not in held]
    if missing:
        raise ConfigError(
            f"problems.{name}.optimizer: it does not hold the parameter '{missing[0]}' of the module; expected all of "
            "them (tasks replace them). Pass a callable: optimizer=functools.partial(torch.optim.SGD, lr=0.1)."
        )


def _check_groups(name: str, optimizer: Optimizer | None) -> None:
    """Refuse a step that torch would take as a part of a graph: it fails at parameters."""
    groups = () if optimizer is None else optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        raise ConfigError(
            f"problems.{name}.optimizer.differentiable: found true; expected false, since a step changes parameters in "
            "place, which no graph can hold. Leave it out: hypergradient: unrolled differentiates steps of SGD, Adam "
            "and AdamW by itself."
        )


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: found {value!r}; expected {expected}. Correct {key}.")
