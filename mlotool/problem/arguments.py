"""The arguments of Problem and Program: of which kind they have to be."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.core.arguments import Rule, is_number, require, require_all
from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.user_code import named
from mlotool.problem.interface import AbstractHypergradient
from mlotool.problem.parallel import AbstractParallel

if TYPE_CHECKING:
    pass


_PROBLEM: Mapping[str, Rule] = {
    "stream": Rule(
        lambda value: (
            value is None or (not isinstance(value, type) and hasattr(value, "next") and hasattr(value, "last"))
        ),
        "a mlotool.Stream or null",
        "Write stream=mlotool.Stream(dataset, batch_size=32).",
    ),
    "optimizer": Rule(
        lambda value: value is None or callable(value) or isinstance(value, Optimizer),
        "a torch optimizer, or a callable that builds one from the parameters",
        "Write optimizer=functools.partial(torch.optim.SGD, lr=0.1).",
    ),
    "scheduler": Rule(
        lambda value: value is None or callable(value),
        "a callable that builds a scheduler from the optimizer, or null",
        "Write scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9).",
    ),
    "hypergradient": Rule(
        lambda value: isinstance(value, AbstractHypergradient | None),
        "a hypergradient that is built, or null",
        "Write hypergradient=mlotool.Implicit(mlotool.ConjugateGradient()), or another one.",
    ),
    "parallel": Rule(
        lambda value: isinstance(value, AbstractParallel | None),
        "layer-parallel training that is built, or null",
        "Write parallel=mlotool.layerparallel.Multigrid(), or leave it out.",
    ),
}

_EXAMPLE = "def loss(batch, *, model): return mse_loss(model(batch['input']), batch['target'])"


def check_problem(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a problem that are of a wrong kind or out of range; not its module.

    Args:
        given: the arguments by name.

    Raises:
        ConfigError: with the first of them.
    """
    name, roles = given["name"], given["roles"]
    require(isinstance(name, str) and name != "", "Problem.name", name, "a text, such as 'classifier'")
    _check_roles(f"problems.{name}.loss.roles", name, roles)
    _check_loss(f"problems.{name}.loss", given["loss"], roles or {})
    require_all(f"problems.{name}", given, _PROBLEM)


def made(key: str, maker: Callable[..., Any], argument: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
    """Return what a callable of the user's makes of an argument.

    Raises:
        ConfigError: it does not accept the argument or its own settings, or makes something else.
    """
    try:
        found = maker(argument)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {named(maker)} failed: {error}; expected that it builds {expected}. Correct it, or its settings."
        ) from error
    if not is_right(found):
        raise ConfigError(f"{key}: {named(maker)} has returned {shown(found)}; expected {expected}. Return one.")
    return found


def check_scheduler(problem: str, scheduler: Any, optimizer: Optimizer | None, interval: str) -> None:
    """Refuse a scheduler of another optimizer, of rates that are no numbers, or that wants a metric at each step.

    Raises:
        ConfigError: with the first of them.
    """
    key = f"problems.{problem}.scheduler"
    name = named(scheduler)
    own = getattr(scheduler, "optimizer", optimizer)
    if own is not optimizer:
        raise ConfigError(
            f"{key}: {name} sets the rates of another optimizer; expected the one that it was given. Build it from "
            "that one: lambda optimizer: StepLR(optimizer, 10)."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and interval == "step":
        raise ConfigError(
            f"{key}: found ReduceLROnPlateau with scheduler_interval=step; expected scheduler_interval=evaluation, as "
            "it needs an objective that is evaluated during training. Set "
            f"problems.{problem}.scheduler_interval=evaluation and give evaluate.splits a number of ticks for the "
            "objective's split."
        )
    for group in optimizer.param_groups if optimizer is not None else ():
        rate = group.get("lr")
        is_right = rate is None or is_number(rate) or (isinstance(rate, Tensor) and not rate.is_complex())
        advice = f"Let {name} return numbers." if scheduler is not None else ""
        require(is_right, f"problems.{problem}.optimizer.lr", rate, "a number", advice)


def needs_batch(name: str, error: Exception) -> ConfigError | None:
    """Return what to raise where a loss that has no stream has failed; None where that is not the reason."""
    if not isinstance(error, TypeError | AttributeError) or "NoneType" not in str(error):
        return None
    return ConfigError(
        f"problems.{name}.stream: found None, so that the loss was called with batch=None, and failed: {error}; "
        "expected a stream, where the loss uses its batch. Give it one: stream: {split: train, batch_size: 32} in a "
        "recipe, stream=mlotool.Stream(dataset, batch_size=32) in Python."
    )


def _check_roles(key: str, name: str, roles: Any) -> None:
    expected, advice = "problems' names by argument of the loss", f"Write roles={{'model': '{name}'}}."
    is_right = roles is None or (isinstance(roles, Mapping) and all(isinstance(each, str) for each in roles))
    require(is_right, key, roles, expected, advice)
    for role, value in (roles or {}).items():
        is_right = isinstance(value, str)
        if isinstance(value, Mapping):
            is_named = isinstance(value.get("problem"), str) and set(value) <= {"problem", "mode"}
            is_right = is_named and value.get("mode") in ("train", "eval", None)
        expected = "a problem's name, or {problem: <name>, mode: train | eval}"
        require(is_right, f"{key}.{role}", value, expected)


def _check_loss(key: str, loss: Any, roles: Mapping[str, Any]) -> None:
    call = ", ".join(["loss(batch", *(f"{role}=..." for role in roles)]) + ")"
    expected = f"a function that is called as {call}"
    require(callable(loss) and not isinstance(loss, type), key, loss, expected, f"Write one: {_EXAMPLE}.")
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        # Compiled code has none.
        return
    try:
        signature.bind(None, **dict.fromkeys(roles))
    except TypeError as error:
        name = named(loss)
        advice = "Take the batch first, and each role by its name: def loss(batch, *, model)."
        if name.startswith("torch."):
            advice = f"Call it in a function of yours: {_EXAMPLE}."
        elif "missing" in str(error):
            advice = "Give it a role if it is a module, as in roles={'model': 'classifier'}, or else a default."
        raise ConfigError(f"{key}: {name} does not fit ({error}); expected {expected}. {advice}") from None
