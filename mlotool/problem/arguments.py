"""What a problem is given: arguments of the right kind, and a module that can be trained, saved and kept apart."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.core.arguments import Rule, is_number, require, require_all, shown
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.user_code import is_of_user, named
from mlotool.problem.interface import AbstractHypergradient
from mlotool.problem.parallel import AbstractParallel


def _is_stream(value: Any) -> bool:
    return value is None or (not isinstance(value, type) and hasattr(value, "next") and hasattr(value, "last"))


def _is_optimizer(value: Any) -> bool:
    return value is None or callable(value) or isinstance(value, Optimizer)


def _is_scheduler(value: Any) -> bool:
    return value is None or callable(value)


_BUILT_ALGORITHM = "a hypergradient that is built, or null"
_BUILT_PARALLEL = "layer-parallel training that is built, or null"
_PROBLEM: Mapping[str, Rule] = {
    "stream": Rule(_is_stream, "a mlotool.Stream or null"),
    "optimizer": Rule(_is_optimizer, "a torch optimizer, or a callable that builds one from the parameters"),
    "scheduler": Rule(_is_scheduler, "a callable that builds a scheduler from the optimizer, or null"),
    "hypergradient": Rule(lambda value: isinstance(value, AbstractHypergradient | None), _BUILT_ALGORITHM),
    "parallel": Rule(lambda value: isinstance(value, AbstractParallel | None), _BUILT_PARALLEL),
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
    key, advice = f"problems.{name}.loss.roles", f"Write roles={{'model': '{name}'}}."
    is_right = roles is None or (isinstance(roles, Mapping) and all(isinstance(role, str) for role in roles))
    require(is_right, key, roles, "problems' names by argument of the loss", advice)
    for role, value in (roles or {}).items():
        expected = "a problem's name, or {problem: <name>, mode: train | eval}"
        require(isinstance(value, str) or _is_role(value), f"{key}.{role}", value, expected)
    _check_loss(f"problems.{name}.loss", given["loss"], roles or {})
    require_all(f"problems.{name}", given, _PROBLEM)


def _is_role(value: Any) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"problem", "mode"}:
        return False
    return isinstance(value.get("problem"), str) and value.get("mode") in ("train", "eval", None)


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
        raise ConfigError(f"{key}: {named(loss)} does not fit ({error}); expected {expected}: {_EXAMPLE}.") from None


def made(key: str, maker: Callable[..., Any], argument: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
    """Return what a callable of the user's makes of an argument.

    Raises:
        ConfigError: it does not accept the argument or its own settings, or makes something else.
    """
    try:
        value = maker(argument)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {named(maker)} failed: {error}; expected that it builds {expected}. Correct it, or its settings."
        ) from error
    if not is_right(value):
        raise ConfigError(f"{key}: {named(maker)} has returned {shown(value)}; expected {expected}. Return one.")
    return value


def check_scheduler(problem: str, scheduler: Any, optimizer: Optimizer | None, interval: str) -> None:
    """Refuse a scheduler of another optimizer, of rates that are no numbers, or that wants a metric at each step.

    Raises:
        ConfigError: with the first of them.
    """
    key, name = f"problems.{problem}.scheduler", named(scheduler)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"{key}: {name} sets the rates of another optimizer; expected the one that it was given. Write "
            "lambda optimizer: StepLR(optimizer, 10)."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and interval == "step":
        raise ConfigError(
            f"{key}: found ReduceLROnPlateau with scheduler_interval=step; expected scheduler_interval=evaluation, as "
            "it needs an objective. Set it."
        )
    for group in optimizer.param_groups if optimizer is not None else ():
        rate = group.get("lr")
        is_right = rate is None or is_number(rate) or (isinstance(rate, Tensor) and not rate.is_complex())
        require(is_right, f"problems.{problem}.optimizer.lr", rate, "a number")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, such as LBFGS with its line search."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def needs_batch(name: str, error: Exception) -> ConfigError | None:
    """Return what to raise where a loss that has no stream has failed; None where that is not the reason."""
    if not isinstance(error, TypeError | AttributeError) or "NoneType" not in str(error):
        return None
    return ConfigError(
        f"problems.{name}.stream: found None, so that the loss was called with batch=None, and failed: {error}; "
        "expected a stream. Write stream: {split: train, batch_size: 32}, or stream=mlotool.Stream(...) in Python."
    )


def without_gradient(problem: str) -> ConfigError:
    """Return what to raise where a loss has no graph."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return ConfigError(
            f"problems.{problem}.loss: its gradient is wanted where gradients are switched off; expected that they are "
            "on. Leave the block of torch.no_grad() or torch.inference_mode()."
        )
    return ConfigError(
        f"problems.{problem}.loss: the loss does not depend on any parameter of '{problem}'; expected that it does. "
        f"Give it a role that plays '{problem}', or an edge through which '{problem}' shapes what it reads."
    )


def check_module(problem: str, module: Any) -> None:
    """Refuse what is no module, and a module whose parameters cannot be trained, moved or saved.

    Args:
        problem: the problem's name.
        module: of the problem.

    Raises:
        ConfigError: it is no nn.Module, or has a parameter that is sparse, without values, or whose elements share
            memory.
    """
    key = f"problems.{problem}.module"
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{key}: found {module!r}; expected an nn.Module, built. Give one, such as nn.Linear(3, 1).")
    for path, parameter in module.named_parameters():
        fault = _fault(parameter)
        if fault is not None:
            raise ConfigError(f"{key}: the parameter '{path}' of {type(module).__name__} {fault}.")


def _fault(parameter: Tensor) -> str | None:
    if is_lazy(parameter):
        return None
    if parameter.is_meta:
        return "is on the device 'meta'; expected parameters with values. Make the module without that device"
    if parameter.is_inference():
        return "was made in torch.inference_mode(); expected one that a step can change. Make it outside of that block"
    if parameter.layout != torch.strided:
        return "is sparse; expected dense parameters. Make it dense: .to_dense()"
    if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return "has elements that share memory; expected a number for each. Make it nn.Parameter(tensor.clone())"
    return None


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
                        raise ConfigError(
                            f"problems.{problem}.module: its parameter '{path}' is the parameter '{other}' of "
                            f"problems.{owner}.module; expected that one problem trains it. Give one of them a copy, "
                            "or a role for the other problem."
                        )


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
        if owner != problem:
            raise ConfigError(
                f"problems.{problem}.{argument}: found the {type(value).__name__} of problems.{owner}.{argument}; "
                "expected one of its own, since it keeps what it has seen. Make one for each problem."
            )


def check_used(problem: str, module: nn.Module) -> None:
    """Refuse a lazy module that has no shape yet though a loss was evaluated.

    Raises:
        RunError: a parameter has none.
    """
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise RunError(
                f"problems.{problem}.module: the parameter '{path}' of {named(module)} has no shape yet, though a loss "
                "was evaluated; expected that the forward calls each lazy layer. Call it there, or remove it."
            )


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
        missing = next((path for path, _ in module.named_parameters() if path not in state), None)
        require(missing is None, key, missing, f"all parameters in the state_dict() of {name}")
        module.load_state_dict(state)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"{key}: {name} does not save and load its state ({type(error).__name__}: {reason}); expected that it "
            "loads what it has saved, which checkpoints need. Correct its state_dict and load_state_dict."
        ) from error
