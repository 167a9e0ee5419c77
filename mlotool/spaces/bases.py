"""What a space keeps of its base beside the forward (hooks, methods, attributes), and which bases it refuses."""

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown
from mlotool.spaces.tracing import AS_LEAF, CALLS, WHOLE, matches

MODULE_METHODS = (
    *(name for name, value in vars(nn.Module).items() if name[0] != "_" and isinstance(value, FunctionType)),
    *("_apply", "__call__", "__setattr__"),
)
"""The methods that a space has from torch, whatever its base does."""

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
"""The methods that a space has of its own."""

_STATE_METHODS = ("_save_to_state_dict", "_load_from_state_dict")
"""Methods that a class may have of its own, since a space calls them when its state is saved or loaded."""

_OWN_NAMES = {
    *("decisions", "changes", "nodes", "_own_type", "_arguments", "_is_rewired", "_fixed", "_run"),
    *("table", "paths", "_path", "_origins", "_draws"),
}

MAX_PATHS = 8
"""So many of a base's modules are named in a message."""


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
    value = inspect.getattr_static(kind, name)
    if isinstance(value, FunctionType) and "__class__" in value.__code__.co_freevars:
        raise LostMethodError(
            f"{kind.__name__}.{name}: calls super(), which wants an object of {kind.__name__}, and a space is none; "
            f"expected a method without it. Leave it out, or {AS_LEAF}."
        )
    bound = getattr(type(value), "__get__", None)
    return value if bound is None else bound(value, module, kind)


def call_hooks(module: nn.Module) -> list[str]:
    """Return the kinds of hooks of a module that a call of it runs."""
    return [kind for kind, name in CALL_HOOKS.items() if getattr(module, name)]


def has_own_behaviour(module: nn.Module) -> bool:
    """Say whether a module that holds others does more than that when its mode, its parameters or its state are set."""
    of_state = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _STATE_METHODS)
    return of_state or bool(own_methods(module)) or any(getattr(module, name) for name in _STATE_HOOKS)


def as_object_of(kind: type, module: nn.Module) -> nn.Module:
    """Return an object of a class that has the state of a module, and none of its own: what one sets, both have."""
    made: nn.Module = object.__new__(kind)
    object.__setattr__(made, "__dict__", module.__dict__)
    return made


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


def _extras(module: nn.Module) -> set[str]:
    inside = list(module.modules())
    return {kind for each in inside for kind in call_hooks(each)} | (
        {"parametrizations"} if any(map(is_parametrized, inside)) else set()
    )


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


def followed(graph: fx.Graph) -> set[str]:
    """Return the paths of the modules whose forward a graph has followed."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    return {call.partition("@")[0] for node in graph.nodes for call in node.meta.get(CALLS, ())} - called - {""}


def check_hooks(base: nn.Module, graph: fx.Graph) -> None:
    """Refuse hooks of modules whose forward a graph has followed; those of the model itself a space takes over."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for path, module in base.named_modules():
        is_called = any(path == each or path.startswith(f"{each}.") for each in called)
        if path and not is_called and call_hooks(module):
            raise ConfigError(
                f"leaves: found hooks of '{path}', whose forward is followed, so that they would not be called; "
                f"expected them on a layer or a leaf. Write leaves: ['{path}']."
            )


def refuse_hooks(root: nn.Module, paths: Iterable[str]) -> None:
    """Let modules refuse hooks of calls from now on; those that are not there any more are passed over."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for path in paths:
        if path in modules:
            modules[path].__dict__.update({name: _NoHooks() for name in CALL_HOOKS.values()})


def check_leaves(base: nn.Module, leaves: Sequence[str]) -> None:
    """Refuse a leaf that is none of the base's modules."""
    modules = list(base.named_modules())
    paths = [path for path, _ in modules if path]
    # A base may be without a part by its own settings: `down` is None, `blocks` of `blocks.*.norm` an empty list.
    none = [
        f"{path}.{name}".lstrip(".")
        for path, module in modules
        for name, value in {**module._modules, **vars(module)}.items()
        if value is None and name[0] != "_"
    ]
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    empty = [path for path, module in modules if isinstance(module, lists) and not len(module)]
    for pattern in () if WHOLE in leaves else leaves:
        names = pattern.split(".")
        above = [".".join(names[:count]) for count in range(1, len(names)) if "*" in names[count]]
        is_absent = any(matches(path, each) for path in empty for each in above)
        if not is_absent and not any(matches(path, pattern) for path in paths + none):
            some = ", ".join(paths[:MAX_PATHS]) + (", .." if len(paths) > MAX_PATHS else "")
            raise ConfigError(
                f"leaves: found {shown(pattern)}, which is no module of {type(base).__name__}; expected paths such as "
                f"{some or WHOLE}.{did_you_mean(pattern, paths)} Correct the path, or remove it."
            )


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


def check_own_names(base: nn.Module) -> None:
    """Refuse a base of which a space would lose something without a word."""
    changed = own_methods(base)
    if changed:
        raise ConfigError(
            f"base: found {type(base).__name__}.{changed[0]}, which a space has from torch.nn.Module; expected a model "
            f"that leaves it as it is. Put it into a module inside, or {AS_LEAF}."
        )
    names = sorted({*vars(base), *base._modules, *base._parameters, *base._buffers} & _OWN_NAMES)
    if names:
        raise ConfigError(
            f"base: found {type(base).__name__} with an attribute '{names[0]}', which a space has for itself; expected "
            f"another name. Rename it, or {AS_LEAF}."
        )
