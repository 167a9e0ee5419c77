"""What torch and the hypergradients themselves refuse: they are built once, on a parameter of no problem."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlotool.config.instantiate import instantiate, optimizer_factory, scheduler_factory
from mlotool.config.optimizer_roles import optimizer_roles
from mlotool.config.parameter_groups import KEY
from mlotool.config.trusted import is_of_user
from mlotool.core.errors import ConfigError


def construction_faults(
    values: Mapping[str, Any], hypergradients: Mapping[str, Any], known: Sequence[str]
) -> list[str]:
    """Return what optimizers, schedulers and hypergradients say of their settings.

    Args:
        values: the config.
        hypergradients: those that are used, by their keys.
        known: faults that were found already; a node that has one is not built.
    """
    faults: list[str] = []
    for name, problem in values["problems"].items():
        key, scheduler = f"problems.{name}", problem["scheduler"]
        optimizer = None
        if _is_ready(f"{key}.optimizer", problem["optimizer"], known):
            optimizer = noted(faults, partial(_optimizer, f"{key}.optimizer", problem["optimizer"]))
        if optimizer is not None and scheduler is not None and _is_ready(f"{key}.scheduler", scheduler, known):
            noted(faults, partial(scheduler_factory(f"{key}.scheduler", scheduler), optimizer))
    for key, node in hypergradients.items():
        if _is_ready(key, node, known):
            noted(faults, partial(instantiate, key, node))
    return faults


def is_sound(key: str, node: Any, known: Sequence[str]) -> bool:
    """Say whether a node may be built: it has no fault yet."""
    return isinstance(node, Mapping) and not any(fault.startswith((f"{key}.", f"{key}:", f"{key}[")) for fault in known)


def _is_ready(key: str, node: Any, known: Sequence[str]) -> bool:
    """Say whether a node may be built here: one of the user's classes may need what a run gives it."""
    return is_sound(key, node, known) and not is_of_user(node.get("_target_"))


def module_optimizer(key: str, node: Mapping[str, Any], module: Any) -> Any:
    """Build an optimizer of a module's own parameters, whose names its groups may match."""
    settings = {each: value for each, value in node.items() if each not in optimizer_roles(node)}
    names = {id(tensor): each for each, tensor in module.named_parameters()}
    return optimizer_factory(key, settings, lambda: names)(module.parameters())


def _optimizer(key: str, node: Mapping[str, Any]) -> Any:
    import torch

    settings = {each: value for each, value in node.items() if each not in (KEY, *optimizer_roles(node))}
    # Of two dimensions, as some optimizers take matrices alone.
    return optimizer_factory(key, settings)([torch.nn.Parameter(torch.zeros(2, 2))])


def noted(faults: list[str], build: Callable[[], Any]) -> Any:
    """Return what is built; None, with the fault noted, where it cannot be."""
    try:
        return build()
    except ConfigError as error:
        faults.append(" ".join(str(error).split()))
        return None
