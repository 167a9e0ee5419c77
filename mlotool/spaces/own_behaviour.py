"""What modules do beside their forward, which a graph or a module in their place would not: hooks and the like."""

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mlotool.core.errors import ConfigError

MODULE_METHODS = (
    *(name for name, found in vars(nn.Module).items() if name[0] != "_" and isinstance(found, FunctionType)),
    *("_apply", "__call__", "__setattr__"),
)
"""Of a model's class, those that would be torch's in a space."""

CALL_HOOKS = {
    "forward hooks": "_forward_hooks",
    "forward pre-hooks": "_forward_pre_hooks",
    "backward hooks": "_backward_hooks",
    "backward pre-hooks": "_backward_pre_hooks",
}
"""Kinds of hooks that a call of a module runs, and what holds them there."""

_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


_FREE = {"forward", "extra_repr"}
"""Of these a space has its own."""

_STATE_METHODS = ("_save_to_state_dict", "_load_from_state_dict")
"""What a class may do beside torch when its state is saved or loaded; a space does it as well."""


class LostMethodError(ConfigError, AttributeError):
    """What a base offers beside its forward, and its space does not have."""


def own_methods(module: nn.Module) -> list[str]:
    """Return the methods of a module that are its class's and no longer torch's."""
    names = (name for name in MODULE_METHODS if name not in _FREE)
    return [name for name in names if getattr(type(module), name) is not getattr(nn.Module, name)]


def offered(kind: type, name: str, module: nn.Module) -> Any:
    """Return what a class offers under a name, for a module that is not of that class.

    Args:
        kind: the class.
        name: of a method, a property, or a value.
        module: what a method gets as `self`.

    Raises:
        LostMethodError: a method calls `super()`, which wants an object of the class.
    """
    found = inspect.getattr_static(kind, name)
    if isinstance(found, FunctionType) and "__class__" in found.__code__.co_freevars:
        raise LostMethodError(
            f"{kind.__name__}.{name}: calls super(), which wants an object of {kind.__name__}, and a space is none; "
            "expected a method without it. Write leaves: ['.'], which makes one node of the whole model."
        )
    bound = getattr(type(found), "__get__", None)
    return found if bound is None else bound(found, module, kind)


def call_hooks(module: nn.Module) -> list[str]:
    """Return the kinds of hooks of a module that a call of it runs."""
    return [kind for kind, name in CALL_HOOKS.items() if getattr(module, name)]


def has_own_behaviour(module: nn.Module) -> bool:
    """Say whether a module that holds others does more than that when its mode, its parameters or its state are set."""
    of_state = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _STATE_METHODS)
    return of_state or bool(own_methods(module)) or any(getattr(module, name) for name in _STATE_HOOKS)


def as_object_of(kind: type, module: nn.Module) -> nn.Module:
    """Return an object of a class that has the state of a module, and none of its own: what one sets, both have."""
    found: nn.Module = object.__new__(kind)
    object.__setattr__(found, "__dict__", module.__dict__)
    return found


def check_keeps(place: str, before: Iterable[nn.Module], new: nn.Module) -> None:
    """Refuse a new module that lacks what those have that it stands for.

    Args:
        place: where, for the message.
        before: that stood there.
        new: that stands there now.

    Raises:
        ConfigError: they have hooks or parametrizations (`torch.nn.utils.parametrizations`), and it has none.
    """
    lost = sorted({kind for module in before for kind in _kinds(module)} - _kinds(new))
    if lost:
        raise ConfigError(
            f"found {lost[0]} of '{place}', which {type(new).__name__} in its place would not have; expected a new "
            "module that has some of its own. Write a candidate that is made with them, or another path."
        )


def _kinds(module: nn.Module) -> set[str]:
    inside = list(module.modules())
    parametrized = {"parametrizations"} if any(map(is_parametrized, inside)) else set()
    return parametrized.union(*map(call_hooks, inside))
