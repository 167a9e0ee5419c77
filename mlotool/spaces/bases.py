"""Which bases a space refuses, as it would lose something of them without a word."""

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from types import FunctionType
from typing import Any

from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown
from mlotool.spaces.tracing import AS_LEAF, WHOLE, matches

MAX_PATHS = 8
"""So many of a base's modules are named in a message."""

_HOOKS = {
    "forward hooks": "_forward_hooks",
    "forward pre-hooks": "_forward_pre_hooks",
    "backward hooks": "_backward_hooks",
    "backward pre-hooks": "_backward_pre_hooks",
}
"""Kinds of hooks that a call of a module runs, and what holds them there."""


class LostMethodError(ConfigError, AttributeError):
    """What a base offers beside its forward, and its space does not have."""


def check_base(base: nn.Module) -> None:
    """Refuse what is no module, and modules whose parameters have no shape yet."""
    if not isinstance(base, nn.Module):
        raise ConfigError(
            f"base: found {type(base).__name__}; expected a module, or a function that makes one. Correct it."
        )
    for path, module in base.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ConfigError(
                f"base: found the lazy module '{path}', whose parameters have no shape yet; expected shapes that are "
                f"known. Write {type(module).__name__.removeprefix('Lazy')} with its sizes."
            )


def check_own_names(base: nn.Module, names: Iterable[str]) -> None:
    """Refuse a base with an attribute that a space has for itself."""
    for name in names:
        if hasattr(base, name):
            raise ConfigError(
                f"base: found {type(base).__name__} with an attribute '{name}', which a space has for itself; expected "
                f"another name. Rename it, or {AS_LEAF}."
            )


def check_methods(kind: type[nn.Module]) -> None:
    """Refuse a class with a `train`, a `state_dict` or the like of its own, which a changed graph would not have."""
    for name, method in inspect.getmembers(nn.Module, lambda value: isinstance(value, FunctionType)):
        is_public = name[0] != "_" or name in ("_apply", "__call__", "__setattr__")
        if is_public and name not in ("forward", "extra_repr") and getattr(kind, name) is not method:
            raise ConfigError(
                f"base: found {kind.__name__}.{name}, which a space whose mutators change what is connected to what "
                f"has from torch.nn.Module; expected a model that leaves it as it is. Put it into a module inside, or "
                f"{AS_LEAF}."
            )


def check_leaves(base: nn.Module, leaves: Sequence[str]) -> None:
    """Refuse leaves that are none of a base's modules; a part that a base is without (None, an empty list) is one."""
    paths = [path for path, _ in base.named_modules() if path]
    for pattern in leaves:
        names = list(takewhile(lambda name: not set(name) & set("*?["), pattern.split(".")))
        present: Any = base if names or any(matches(path, pattern) for path in paths) else pattern
        for name in names if pattern != WHOLE else ():
            present = getattr(present, name, pattern)
        if present is not None and not isinstance(present, nn.Module):
            some = ", ".join(paths[:MAX_PATHS]) + (", .." if len(paths) > MAX_PATHS else "")
            raise ConfigError(
                f"leaves: found {shown(pattern)}, which is no module of {type(base).__name__}; expected paths such as "
                f"{some or WHOLE}.{did_you_mean(pattern, paths)} Correct the path, or remove it."
            )


def check_hooks(base: nn.Module, graph: fx.Graph) -> None:
    """Refuse hooks of modules whose forward a graph has followed; those of the model itself a space takes over."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for path, module in base.named_modules():
        is_called = any(path == each or path.startswith(f"{each}.") for each in called)
        if path and not is_called and _hooks(module):
            raise ConfigError(
                f"leaves: found hooks of '{path}', whose forward is followed, so that they would not be called; "
                f"expected them on a layer or a leaf. Write leaves: ['{path}']."
            )


def refuse_hooks(root: nn.Module, graph: fx.Graph) -> None:
    """Let modules whose forward a graph has followed refuse hooks from now on: nobody would call them."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for path, module in root.named_modules(remove_duplicate=False):
        is_called = any(path == target or path.startswith(f"{target}.") for target in called)
        if path and not is_called and "parametrizations" not in path.split("."):
            module.__dict__.update({name: _NoHooks() for name in _HOOKS.values()})


class _NoHooks(OrderedDict[int, Any]):
    """The hooks of a module that nobody calls: none."""

    def __setitem__(self, key: int, value: Any) -> None:
        """Refuse one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "found a new hook of a module whose forward a space has followed, so that it would not be called; expected "
            "hooks of the space, of its layers and of its leaves. Declare the module as a leaf: leaves: [<its path>]."
        )


def check_keeps(place: str, before: Iterable[nn.Module], new: nn.Module) -> None:
    """Refuse a new module that lacks what those have that it stands for.

    Args:
        place: where, for the message.
        before: that stood there.
        new: that stands there now.

    Raises:
        ConfigError: they have hooks or parametrizations (`torch.nn.utils.parametrizations`), and it has none.
    """
    lost = sorted({kind for module in before for kind in _extras(module)} - _extras(new))
    if lost:
        raise ConfigError(
            f"found {lost[0]} of '{place}', which {type(new).__name__} in its place would not have; expected a new "
            "module that has some of its own. Write a candidate that is made with them, or another path."
        )


def _hooks(module: nn.Module) -> set[str]:
    return {kind for kind, name in _HOOKS.items() if getattr(module, name)}


def _extras(module: nn.Module) -> set[str]:
    inside = list(module.modules())
    parametrized = {"parametrizations"} if any(map(is_parametrized, inside)) else set()
    return parametrized.union(*map(_hooks, inside))
