"""Which modules a problem can train."""

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mlotool.core.errors import ConfigError, RunError
from mlotool.core.messages import shown
from mlotool.core.plain_state import is_like
from mlotool.core.user_code import is_of_user, named


def check_module(problem: str, module: Any) -> None:
    """Refuse what is no module, and a module whose parameters cannot be trained, moved or saved.

    Args:
        problem: the problem's name.
        module: of the problem.

    Raises:
        ConfigError: it is no nn.Module, holds itself, or has a parameter that is sparse, without values, or whose
            elements share memory.
    """
    key = f"problems.{problem}.module"
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{key}: found {module!r}; expected an nn.Module, built. Give one, such as nn.Linear(3, 1).")
    name = type(module).__name__
    inside = _holds_itself(module, [])
    if inside is not None:
        raise ConfigError(
            f"{key}: {name} holds itself, as '{inside}'; expected modules that hold others. Remove that attribute, or "
            "keep it where nn.Module does not look: in a list of one."
        )
    for path, parameter in module.named_parameters():
        fault = _fault(parameter)
        if fault is not None:
            found, expected, advice = fault
            raise ConfigError(f"{key}: the parameter '{path}' of {name} {found}; expected {expected}. {advice}")


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
                # Tasks replace the tensor that stands in a place; another tensor may have the same memory.
                for place in ((id(child), name), _memory(parameter)):
                    owner, other = owners.setdefault(place, (problem, path))
                    if owner != problem:
                        raise ConfigError(
                            f"problems.{problem}.module: its parameter '{path}' is the parameter '{other}' of "
                            f"problems.{owner}.module; expected that one problem trains it. Give one of them a copy: "
                            "copy.deepcopy(module); or let its loss have a role for the other problem, and leave the "
                            "parameter out of its own module."
                        )


def check_kept(problem: str, module: nn.Module, theta: Mapping[str, Tensor]) -> None:
    """Refuse a module whose parameters are others than when its problem was made.

    Raises:
        ConfigError: a layer was replaced, added or frozen since then.
    """
    now = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    changed = [name for name in {**theta, **now} if theta.get(name) is not now.get(name)]
    if changed:
        raise ConfigError(
            f"problems.{problem}.module: its parameter '{changed[0]}' was replaced, added, removed or frozen after "
            "the problem was made; expected the same ones, which its optimizer steps. Change the module before "
            "Problem(...)."
        )


def check_module_state(key: str, saved: Mapping[str, Any], module: nn.Module) -> None:
    """Refuse a saved state of another module.

    Args:
        key: of the problem's state.
        saved: what the module's `state_dict` should have returned.
        module: of the problem.

    Raises:
        ConfigError: a tensor has another shape, or other kinds of numbers.
    """
    for name, tensor in module.state_dict().items():
        # A lazy parameter takes the shape of what it loads.
        if isinstance(tensor, Tensor) and not is_lazy(tensor) and not is_like(saved.get(name), tensor):
            raise ConfigError(
                f"{key}: found {shown(saved.get(name))} for '{name}' of its module; expected {shown(tensor)}. Load it "
                "into the same module."
            )


def without_gradient(problem: str) -> ConfigError:
    """Return what to raise where a loss has no graph."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return ConfigError(
            f"problems.{problem}.loss: its gradient is wanted where gradients are switched off; expected that they are "
            "on. Leave the block of torch.no_grad() or torch.inference_mode(), or call torch.set_grad_enabled(True)."
        )
    return ConfigError(
        f"problems.{problem}.loss: the loss does not depend on any parameter of '{problem}'; expected that it does. "
        f"Give it a role that plays '{problem}', or an edge through which '{problem}' shapes what it reads; with "
        "the first_order hypergradient nothing passes through a solution, and what a loss or a module has kept of its "
        "last call leads to the parameters of then."
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
        missing = [path for path, _ in module.named_parameters() if path not in state]
        if not missing:
            module.load_state_dict(state)
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"{key}: {name} does not save and load its state ({type(error).__name__}: {reason}); expected that it "
            "loads what it has saved, which checkpoints need. Correct its state_dict, load_state_dict, get_extra_state "
            "and set_extra_state, or remove them."
        ) from error
    if missing:
        raise ConfigError(
            f"{key}: the state_dict() of {name} lacks the parameter '{missing[0]}'; expected all of them, or a "
            "checkpoint would not have them. Add to what super().state_dict() returns."
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


def _memory(parameter: Tensor) -> Hashable:
    """Return what is equal for tensors that begin at the same place."""
    if is_lazy(parameter) or not parameter.data_ptr():
        return id(parameter)
    return parameter.device, parameter.data_ptr()


def _holds_itself(module: nn.Module, above: list[nn.Module]) -> str | None:
    """Return the path at which a module stands below itself."""
    if any(module is each for each in above):
        return ""
    for name, child in module.named_children():
        path = _holds_itself(child, [*above, module])
        if path is not None:
            return f"{name}.{path}".rstrip(".")
    return None


def _fault(parameter: Tensor) -> tuple[str, str, str] | None:
    """Return what was found, what was expected and what to do."""
    if is_lazy(parameter):
        return None
    if parameter.is_meta:
        return (
            "is on the device 'meta', which has no values",
            "parameters with their values",
            "Make the module without that device.",
        )
    if parameter.is_inference():
        return (
            "was made in torch.inference_mode(), so that no step can change it",
            "parameters that can be trained",
            "Make the module outside of that block.",
        )
    if parameter.layout != torch.strided:
        return "is sparse", "dense parameters", "Make it dense: .to_dense()."
    if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return (
            "has elements that share memory, as expand() makes them",
            "a number for each element",
            "Make it nn.Parameter(tensor.clone()), or expand it in forward.",
        )
    return None


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, such as LBFGS with its line search."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
