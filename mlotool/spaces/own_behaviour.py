"""What modules do beside their forward, which a graph or a module in their place would not: hooks and the like."""

from collections.abc import Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mlotool.core.errors import ConfigError

MODULE_METHODS = (
    *("train", "eval", "requires_grad_", "_apply", "parameters", "named_parameters", "state_dict", "load_state_dict"),
    *("_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state", "__call__", "__setattr__"),
)
"""Of a model's class, those that would be torch's in a space."""

_CALL_HOOKS = {
    "forward hooks": "_forward_hooks",
    "forward pre-hooks": "_forward_pre_hooks",
    "backward hooks": "_backward_hooks",
    "backward pre-hooks": "_backward_pre_hooks",
}
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def own_methods(module: nn.Module) -> list[str]:
    """Return the methods of a module that are its class's and no longer torch's."""
    return [name for name in MODULE_METHODS if getattr(type(module), name) is not getattr(nn.Module, name)]


def call_hooks(module: nn.Module) -> list[str]:
    """Return the kinds of hooks of a module that a call of it runs."""
    return [kind for kind, name in _CALL_HOOKS.items() if getattr(module, name)]


def has_own_behaviour(module: nn.Module) -> bool:
    """Say whether a module that holds others does more than that when its mode, its parameters or its state are set."""
    return bool(own_methods(module)) or any(getattr(module, name) for name in _STATE_HOOKS)


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
