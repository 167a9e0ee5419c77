"""What a problem is given: arguments of the right kind, and a module that can be trained, saved and kept apart."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.lightning_module import is_lightning_module
from mlotool.core.user_code import is_of_user, named
from mlotool.problem.interface import AbstractHypergradient
from mlotool.problem.parallel import AbstractParallel


def check_problem(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a problem that are of a wrong kind; not its module.

    Args:
        given: the arguments by name.

    Raises:
        ConfigError: with the first of them.
    """
    name, roles, loss, stream = (given[key] for key in ("name", "roles", "loss", "stream"))
    require(isinstance(name, str) and name != "", "Problem.name", name, "a text, such as 'classifier'")
    advice = f"Write roles={{'model': '{name}'}}."
    expected = "problems' names by argument of the loss"
    require(roles is None or isinstance(roles, Mapping), f"problems.{name}.loss.roles", roles, expected, advice)
    for role, value in (roles or {}).items():
        expected = "a problem's name, or {problem: <name>, mode: train | eval}"
        require(isinstance(value, str) or _is_role(value), f"problems.{name}.loss.roles.{role}", value, expected)
    call = ", ".join(["loss(batch", *(f"{role}=..." for role in roles or {})]) + ")"
    is_stream = stream is None or (not isinstance(stream, type) and hasattr(stream, "next") and hasattr(stream, "last"))
    optimizer, scheduler, algorithm = given["optimizer"], given["scheduler"], given["hypergradient"]
    for key, is_right, expected in (
        ("loss", _is_loss(given, loss), f"a function that is called as {call}, or none for a LightningModule"),
        ("stream", is_stream, "a mlotool.Stream, a torch.utils.data.DataLoader or null"),
        ("optimizer", optimizer is None or callable(optimizer) or isinstance(optimizer, str | Optimizer), _OPTIMIZER),
        ("scheduler", scheduler is None or callable(scheduler), "a callable that builds a scheduler, or null"),
        ("hypergradient", isinstance(algorithm, str | AbstractHypergradient | None), _HYPERGRADIENT),
        ("parallel", isinstance(given["parallel"], AbstractParallel | None), "layer-parallel training, or null"),
    ):
        require(is_right, f"problems.{name}.{key}", given[key], expected)
    if loss is None:
        require(not roles, f"problems.{name}.roles", roles, "none: the loss of a LightningModule is its training_step")
        return
    try:
        _signature(loss).bind(None, **dict.fromkeys(roles or {}))
    except ValueError:  # compiled code has no signature
        return
    except TypeError as error:
        fault = f"problems.{name}.loss: {named(loss)} does not fit ({error}); expected that it is called as {call}"
        raise ConfigError(f"{fault}. Correct its arguments, or the roles.") from None


def default_roles(loss: Any) -> dict[str, str]:
    """Return the roles of a loss that is given without any: its keyword-only arguments are the names of problems.

    Example:
        >>> default_roles(lambda batch, *, model, decay, scale=1.0: None)
        {'model': 'model', 'decay': 'decay'}
    """
    try:
        arguments = _signature(loss).parameters.values()
    except (TypeError, ValueError):  # no function, or compiled code
        return {}
    return {x.name: x.name for x in arguments if x.kind is x.KEYWORD_ONLY and x.default is x.empty}


def _signature(loss: Any) -> inspect.Signature:
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss, follow_wrapped=False)


_OPTIMIZER = "a name such as 'sgd', a torch optimizer, or a callable that builds one from the parameters"
_HYPERGRADIENT = "a name such as 'cg', a built hypergradient, or null"


def _is_loss(given: Mapping[str, Any], loss: Any) -> bool:
    if loss is None:
        return is_lightning_module(given["module"])
    return callable(loss) and not isinstance(loss, type)


def _is_role(value: Any) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"problem", "mode"}:
        return False
    return isinstance(value.get("problem"), str) and value.get("mode") in ("train", "eval", None)


def made(key: str, maker: Callable[..., Any], argument: Any, expected: str, kind: type = object) -> Any:
    """Return what a callable of the user's makes of an argument.

    Raises:
        ConfigError: it does not accept the argument or its own settings, or makes something else.
    """
    try:
        value = maker(argument)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        fault = f"{key}: {named(maker)} failed: {error}; expected that it builds {expected}"
        raise ConfigError(f"{fault}. Correct it, or its settings.") from error
    if not isinstance(value, kind):
        require(False, key, value, f"{expected}, which {named(maker)} should return")
    return value


def check_scheduler(problem: str, scheduler: Any, optimizer: Optimizer | None, interval: str) -> None:
    """Refuse a scheduler of another optimizer, or one that wants a metric at each step.

    Raises:
        ConfigError: with the first of them.
    """
    key = f"problems.{problem}.scheduler"
    require(scheduler is None or hasattr(scheduler, "step"), key, scheduler, "a scheduler")
    is_its = getattr(scheduler, "optimizer", optimizer) is optimizer
    expected, advice = "one of the optimizer that it was given", "Write lambda optimizer: StepLR(optimizer, 10)."
    require(is_its, key, scheduler, expected, advice)
    is_right = interval != "step" or not isinstance(scheduler, ReduceLROnPlateau)
    require(is_right, key, scheduler, "scheduler_interval=evaluation with it, as it needs an objective", "Set it.")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, such as LBFGS with its line search."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def without_gradient(problem: str) -> ConfigError:
    """Return what to raise where a loss has no graph."""
    fault = f"the loss does not depend on any parameter of '{problem}'; expected that it does"
    advice = f"Give it a role for '{problem}', or an edge by which '{problem}' shapes a problem that it reads"
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        fault = "its gradient is needed, but gradients are switched off; expected that they are on"
        advice = "Leave the block of torch.no_grad() or torch.inference_mode()"
    return ConfigError(f"problems.{problem}.loss: {fault}. {advice}.")


def check_module(problem: str, module: Any) -> None:
    """Refuse what is no module, and a module with a parameter that no step of an optimizer can change as it should.

    Args:
        problem: the problem's name.
        module: of the problem.

    Raises:
        ConfigError: it is no nn.Module, or has such a parameter.
    """
    key = f"problems.{problem}.module"
    require(isinstance(module, nn.Module), key, module, "an nn.Module, built", "Give one, such as nn.Linear(3, 1).")
    for path, parameter in module.named_parameters():
        fault = ""
        if parameter.is_meta:
            fault = "on the device meta"
        elif is_lazy(parameter):
            continue
        elif parameter.is_inference():
            fault = "that was made in torch.inference_mode()"
        elif parameter.layout != torch.strided:
            fault = "that is sparse"
        elif (0, True) in zip(parameter.stride(), [size > 1 for size in parameter.shape], strict=True):
            fault = "whose elements share memory, as expand() makes them"
        if fault:
            expected = "one with a number of its own for each element. Make it nn.Parameter(tensor.clone())"
            raise ConfigError(f"{key}.{path}: found a parameter {fault}; expected {expected}.")


def check_owners(modules: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter that two problems train: each would undo the other's steps, and count it as a constant.

    Args:
        modules: by problem.

    Raises:
        ConfigError: with the first such parameter, by its name in both.
    """
    owners: dict[Hashable, tuple[str, str]] = {}
    for problem, module in modules.items():
        for prefix, child in module.named_modules():
            for name, parameter in child._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                path = f"{prefix}.{name}".lstrip(".")
                has_memory = not is_lazy(parameter) and parameter.data_ptr()
                memory = (parameter.device, parameter.data_ptr()) if has_memory else id(parameter)
                # Tasks replace the tensor that stands in a place; another tensor may have the same memory.
                for place in ((id(child), name), memory):
                    owner, other = owners.setdefault(place, (problem, path))
                    if owner != problem:
                        fault = f"its parameter '{path}' is the parameter '{other}' of problems.{owner}.module"
                        advice = "Give one of them a copy, or a role for the other problem."
                        raise ConfigError(f"problems.{problem}.module: {fault}; expected another. {advice}")


def check_shared(argument: str, objects: Mapping[str, Any]) -> None:
    """Refuse an object that two problems were given and each of them would change.

    Args:
        argument: of the problems.
        objects: by problem; None where there is none.

    Raises:
        ConfigError: with the first of them.
    """
    owners: dict[int, str] = {}
    for problem, value in objects.items():
        owner = problem if value is None else owners.setdefault(id(value), problem)
        given, expected = f"that of problems.{owner}", "one of its own, since it keeps what it has seen"
        require(owner == problem, f"problems.{problem}.{argument}", given, expected, "Make one for each problem.")


def check_saving(problem: str, module: nn.Module) -> None:
    """Refuse a module of the user's that does not take back what it saves; a lazy one has nothing yet.

    Raises:
        ConfigError: its state lacks a parameter, or it does not load it.
    """
    if not is_of_user(*module.modules()) or any(map(is_lazy, module.parameters())):
        return
    key, name = f"problems.{problem}.module", named(module)
    try:
        state = module.state_dict()
        module.load_state_dict(state)
    except Exception as error:
        said = f"{key}: {name} does not save and load its state ({type(error).__name__}: {str(error)[:300]})"
        raise ConfigError(f"{said}; expected that it can load what it has saved. Correct its state_dict.") from error
    missing = next((path for path, _ in module.named_parameters() if path not in state), None)
    require(missing is None, key, missing, f"all parameters in the state_dict() of {name}")
