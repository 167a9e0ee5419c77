"""From nodes to objects: the only place that calls a target."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mlotool.config.parameter_groups import KEY, grouped
from mlotool.config.trusted import CONTAINERS, resolve
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RefusedError
from mlotool.core.messages import kind_of
from mlotool.core.user_code import (
    MORE_MEMORY,
    Call,
    explained,
    is_of_user,
    is_out_of_memory,
    is_refusal,
    note,
    user_frame,
)

Instantiate = Callable[..., Any]


class NodeFactory:
    """Builds what a node describes, at each call anew.

    A call's keywords go to every target in the node that has an argument of such a name and no value for it.

    Args:
        key: where the node stands.
        node: has `_target_`.
        instantiate: builds a node.
    """

    takes_settings = True
    """`mlotool.spaces` hands over all that it knows of a place."""

    def __init__(self, key: str, node: Mapping[str, Any], instantiate: Instantiate) -> None:
        self._key, self._node, self._instantiate = key, node, instantiate

    def __call__(self, **settings: Any) -> Any:
        """Return what the node describes."""
        return self._instantiate(self._key, self._node, **settings)


def as_factories(key: str, value: Any, instantiate: Instantiate) -> Any:
    """Return a value in which each node with a `_target_` is a function that builds it; other values stay."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return NodeFactory(key, value, instantiate)
        return {name: as_factories(f"{key}.{name}", each, instantiate) for name, each in value.items()}
    if isinstance(value, list):
        return [as_factories(f"{key}[{index}]", each, instantiate) for index, each in enumerate(value)]
    return value


Node = Mapping[str, Any]
SPECIAL = ("_target_", "_args_")

# Optimizers with a fused kernel on the CPU and on CUDA, and the settings that ask for another one.
_FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
_OTHER_KERNELS = ("foreach", "differentiable", "capturable")


def instantiate(key: str, node: Any, **context: Any) -> Any:
    """Build a node and everything inside it.

    Args:
        key: where the node stands in the config, for messages.
        node: plain dicts, lists and scalars; a dict with `_target_` becomes what its target returns.
        context: objects that are passed on to every target that has a parameter of that name.

    Raises:
        ConfigError: a target is not trusted, or does not accept its settings.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            return _call(key, *_prepared(key, node, context))
        return {name: instantiate(f"{key}.{name}", value, **context) for name, value in node.items()}
    if isinstance(node, list):
        return [instantiate(f"{key}[{index}]", value, **context) for index, value in enumerate(node)]
    return node


def bind(key: str, node: Node, without: Iterable[str]) -> Callable[..., Any]:
    """Return a node's target with its settings bound: a loss or an analysis.

    Args:
        key: where the node stands.
        node: has `_target_`.
        without: keys that are ours, not the target's (`roles`, ...).
    """
    ours = set(without)
    target, _, settings = _prepared(key, {name: value for name, value in node.items() if name not in ours}, {})
    return partial(target, **settings)


def optimizer_factory(
    key: str, node: Node, names: Callable[[], Mapping[int, str]] = dict
) -> Callable[[Iterable[Any]], Any]:
    """Return a function from parameters to the optimizer of a node.

    Args:
        key: where the node stands.
        node: has `_target_`, and may have `groups`.
        names: the parameters' names by identity, for `groups`.
    """
    # YAML has no tuples, and `betas` must be one for some of torch's code paths.
    fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in node.items() if name != KEY}
    groups = node.get(KEY)

    def make(parameters: Iterable[Any]) -> Any:
        params = list(parameters)
        fused = {"fused": True} if _can_fuse(fixed, params) else {}
        if groups:
            named = names()
            params = grouped(f"{key}.{KEY}", groups, {named[id(each)]: each for each in params})
        from torch.optim import Optimizer

        optimizer = instantiate(key, fused | fixed | {"params": params})
        require_kind(key, node, optimizer, Optimizer)
        return optimizer

    return make


def _can_fuse(node: Node, params: Iterable[Any]) -> bool:
    """Say whether torch can update all parameters in one kernel: less than half of the time of a small step."""
    is_free = node["_target_"] in _FUSED and not any(node.get(name) for name in _OTHER_KERNELS)
    return is_free and all(each.is_floating_point() and each.device.type in ("cpu", "cuda") for each in params)


def scheduler_factory(key: str, node: Node) -> Callable[[Any], Any]:
    """Return a function from an optimizer to the scheduler of a node; schedulers inside get the same optimizer."""

    def make(optimizer: Any) -> Any:
        from torch.optim.lr_scheduler import LRScheduler

        scheduler = instantiate(key, node, optimizer=optimizer)
        require_kind(key, node, scheduler, LRScheduler)
        return scheduler

    return make


_KINDS = {
    "AbstractHypergradient": "a hypergradient, a subclass of mlotool.program.AbstractHypergradient",
    "AbstractParallel": "layer-parallel training, a subclass of mlotool.problem.parallel.AbstractParallel",
}


def require_kind(key: str, node: Node, value: Any, kind: type) -> None:
    """Raise ConfigError if what a target has returned is not of a kind."""
    if not isinstance(value, kind):
        expected = _KINDS.get(kind.__name__, f"a torch {kind.__name__}")
        raise ConfigError(
            f"{key}: {node['_target_']} has returned {kind_of(value)}; expected {expected}. "
            "Name such a class, or a function that returns one."
        )


def _prepared(key: str, node: Node, context: Mapping[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    target = resolve(key, node["_target_"])
    settings = {name: value for name, value in node.items() if name not in SPECIAL}
    lazy = getattr(target, "factories", ())
    built = {
        name: as_factories(f"{key}.{name}", value, instantiate)
        if name in lazy
        else _plain_or_built(f"{key}.{name}", value, context)
        for name, value in settings.items()
    }
    if getattr(target, "takes_place", False) and "place" in inspect.signature(target).parameters:
        built.setdefault("place", _place(key))
    assert "_args_" not in node or node["_target_"] in CONTAINERS, f"{key}: _args_ is unchecked"
    arguments = [instantiate(f"{key}._args_[{i}]", value, **context) for i, value in enumerate(node.get("_args_", ()))]
    if context:
        from mlotool.spaces.building import taken

        built |= taken(context, inspect.signature(target).parameters, built)
    return target, arguments, built


def _place(key: str) -> str:
    """Return where in a problem's module a key is; "" for the module itself, which has a seed of its problem's own."""
    return re.sub(r"^problems\.[^.]+\.module\.?", "", key)


def _plain_or_built(key: str, value: Any, context: Mapping[str, Any]) -> Any:
    # A list of parameters passes through: it is no part of the config.
    return value if key.endswith(".params") else instantiate(key, value, **context)


def _call(key: str, target: Any, arguments: list[Any], settings: dict[str, Any]) -> Any:
    try:
        return target(*arguments, **settings)
    except ConfigError as error:
        # mlotool's own messages name the key where they know it.
        if key.partition(".")[0] in str(error).partition(":")[0]:
            raise
        # A draw of a sweep that makes no model is no fault of the recipe's.
        kind = type(error) if isinstance(error, InfeasibleModelError | RefusedError) else ConfigError
        raise kind(f"{key}: {error}") from error
    except (MlotoolError, KeyboardInterrupt):
        raise
    # SystemExit and asyncio.CancelledError, which code of the user's may raise, are no Exceptions.
    except BaseException as error:
        # Code of the user's may fail in what it inherits, too.
        is_inside = is_of_user(target) and error.__traceback__ is not None and error.__traceback__.tb_next is not None
        # What a space raises itself, outside of a model's or a mutator's code, is none of its settings' faults.
        is_own = target.__module__.startswith("mlotool.spaces.") and user_frame(error) is None
        kind = RefusedError if is_refusal(error) and not is_own else ConfigError
        if user_frame(error) is not None or (is_inside and not is_out_of_memory(error)):
            note(error, lambda: Call(key, target, advice=f"Correct it, or the values under {key}."))
            raise kind(explained(error)) from error
        name = f"{target.__module__}.{target.__qualname__}"
        if is_out_of_memory(error):
            reason = f"{type(error).__name__}: {error}".rstrip(": .")
            raise ConfigError(f"{key}: {name} cannot be built ({reason}). {MORE_MEMORY}") from error
        raise kind(
            f"{key}: {name} does not accept its settings: {type(error).__name__}: {error}{_where(error)}. "
            f"Correct the values under {key}."
        ) from error


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" (in {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
