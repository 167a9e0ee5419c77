"""Which modules a problem can train."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mlotool.core.errors import ConfigError, RunError
from mlotool.core.user_code import named


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
    if parameter.layout != torch.strided:
        return "is sparse", "dense parameters", "Make it dense: .to_dense()."
    if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return (
            "has elements that share memory, as expand() makes them",
            "a number for each element",
            "Make it nn.Parameter(tensor.clone()), or expand it in forward.",
        )
    return None
