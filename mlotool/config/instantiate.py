"""From nodes to objects: the only place that calls a target."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from mlotool.config.security.trusted import CONTAINERS, resolve
from mlotool.core import user_code
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RefusedError
from mlotool.core.messages import kind_of

Node = Mapping[str, Any]
SPECIAL = ("_target_", "_args_")
GROUPS_KEY = "groups"
_GROUP = "{match: classifier.*, lr: 0.01}"


def node_factory(key: str, node: Node) -> Callable[..., Any]:
    """Return what builds a node, at each call anew.

    A call's keywords go to every target in the node that has an argument of such a name and no value for it.

    Args:
        key: where the node stands.
        node: has `_target_`.
    """
    factory = partial(instantiate, key, node)
    # `mlotool.spaces` hands over all that it knows of a place.
    factory.takes_settings = True  # type: ignore[attr-defined]
    return factory


def instantiate(key: str, node: Any, **context: Any) -> Any:
    """Build a node and everything inside it.

    Args:
        key: where the node stands in the config, for messages.
        node: plain dicts, lists and scalars; a dict with `_target_` becomes what its target returns.
        context: objects that are passed on to every target that has a parameter of that name.

    Raises:
        ConfigError: a target is not trusted, or does not accept its settings.
    """
    return _with_nodes(key, node, lambda key, node: _call(key, *_prepared(key, node, context)))


def _with_nodes(key: str, value: Any, make: Callable[[str, Node], Any]) -> Any:
    """Return a value in which what `make` returns takes the place of each node with a `_target_`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return make(key, value)
        return {name: _with_nodes(f"{key}.{name}", item, make) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_nodes(f"{key}[{index}]", item, make) for index, item in enumerate(value)]
    return value


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
    settings = {name: _plain(value) for name, value in node.items() if name != GROUPS_KEY}
    groups = node.get(GROUPS_KEY)

    def make(parameters: Iterable[Any]) -> Any:
        from torch.optim import Optimizer

        from mlotool.problem.optimizers.registry import can_fuse

        params = list(parameters)
        fused = {"fused": True} if can_fuse(settings["_target_"], settings, params) else {}
        if groups:
            path_of = names()
            params = grouped(f"{key}.{GROUPS_KEY}", groups, {path_of[id(tensor)]: tensor for tensor in params})
        optimizer = instantiate(key, fused | settings | {"params": params})
        require_kind(key, node, optimizer, Optimizer)
        return optimizer

    return make


def _plain(value: Any) -> Any:
    # YAML has no tuples, and `betas` must be one for some of torch's code paths.
    return tuple(value) if isinstance(value, list) else value


def scheduler_factory(key: str, node: Node) -> Callable[[Any], Any]:
    """Return a function from an optimizer to the scheduler of a node; schedulers inside get the same optimizer."""

    def make(optimizer: Any) -> Any:
        from torch.optim.lr_scheduler import LRScheduler

        scheduler = instantiate(key, node, optimizer=optimizer)
        require_kind(key, node, scheduler, LRScheduler)
        return scheduler

    return make


def optimizer_roles(node: Any) -> dict[str, str]:
    """Return the problem's name by setting, for the settings of an optimizer's node that a problem gives.

    Example:
        >>> optimizer_roles({"_target_": "torch.optim.SGD", "lr": {"problem": "rates"}, "momentum": 0.9})
        {'lr': 'rates'}
    """
    if not isinstance(node, Mapping):
        return {}
    return {
        key: value["problem"]
        for key, value in node.items()
        if isinstance(value, Mapping) and set(value) == {"problem"} and isinstance(value["problem"], str)
    }


def are_learned_alone(node: Any) -> bool:
    """Say whether an optimizer's node has nothing but settings that problems give, for a LightningModule's optimizer.

    Example:
        >>> are_learned_alone({"lr": {"problem": "rates"}}), are_learned_alone({"_target_": "torch.optim.SGD"})
        (True, False)
    """
    return bool(node) and isinstance(node, Mapping) and set(node) == set(optimizer_roles(node))


def grouped(key: str, groups: Sequence[Node], parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: first those that no pattern matches, then one for each entry.

    A parameter is in the first group one of whose patterns matches its name (`*` is any text, dots included).

    Args:
        key: where the groups stand, for messages.
        groups: each with `match`, a pattern or a list of them, and settings.
        parameters: by name in the problem's module.

    Raises:
        ConfigError: a group is left without a parameter.

    Example:
        >>> grouped("groups", [{"match": "head.*", "lr": 0.1}], {"body.weight": 1, "head.weight": 2})
        [{'params': [1]}, {'params': [2], 'lr': 0.1}]
    """
    rest, made = dict(parameters), list[dict[str, Any]]()
    for index, group in enumerate(groups):
        names = [name for name in rest if any(fnmatchcase(name, pattern) for pattern in _patterns(group))]
        if not names:
            raise ConfigError(
                f"{key}[{index}].match: found {group['match']!r}, which matches no parameter that is not in an earlier "
                f"group; expected a pattern for some of {', '.join(parameters)}. Correct the pattern, or remove the "
                "group."
            )
        settings = {name: _plain(value) for name, value in settings_of(group).items()}
        made.append({"params": [rest.pop(name) for name in names], **settings})
    return [{"params": list(rest.values())}, *made] if rest else made


def group_faults(key: str, node: Node) -> Iterator[str]:
    """Yield what is wrong with the shape of an optimizer's groups; `key` is the optimizer's."""
    groups, learned = node.get(GROUPS_KEY, []), optimizer_roles(node)
    if not isinstance(groups, list):
        yield f"{key}.{GROUPS_KEY}: found {groups!r}; expected a list. Write {key}.{GROUPS_KEY}: [{_GROUP}]."
        return
    for index, group in enumerate(groups):
        place = f"{key}.{GROUPS_KEY}[{index}]"
        if not isinstance(group, Mapping) or not _patterns(group) or len(group) < 2:
            yield f"{place}: found {group!r}; expected `match` and settings of the optimizer. Write {_GROUP}."
            continue
        for name in group:
            if name in learned or name in optimizer_roles(group):
                yield f"{place}.{name}: found {group[name]!r}; expected no setting that a problem learns. Remove it."


def settings_of(group: Node) -> dict[str, Any]:
    """Return the settings of one group, without what it matches."""
    return {name: value for name, value in group.items() if name != "match"}


def _patterns(group: Node) -> list[str]:
    match = group.get("match")
    patterns: list[Any] = match if isinstance(match, list) else [match]
    return patterns if all(isinstance(pattern, str) for pattern in patterns) else []


def require_kind(key: str, node: Node, value: Any, kind: type) -> None:
    """Raise ConfigError if what a target has returned is not of a kind."""
    if not isinstance(value, kind):
        wanted = f"an instance of {kind.__module__}.{kind.__qualname__}"
        raise ConfigError(
            f"{key}: {node['_target_']} has returned {kind_of(value)}; expected {wanted}. Name another target."
        )


def _prepared(key: str, node: Node, context: Mapping[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return a node's target, and the arguments by position and by name, with the nodes inside it built."""
    target, settings = resolve(key, node["_target_"]), dict[str, Any]()
    lazy = getattr(target, "factories", ())
    for name, value in node.items():
        place = f"{key}.{name}"
        if name in lazy:
            settings[name] = _with_nodes(place, value, node_factory)
        elif name not in SPECIAL:
            # A list of parameters passes through: it is no part of the config.
            settings[name] = value if name == "params" else instantiate(place, value, **context)
    if getattr(target, "takes_place", False) and "place" in inspect.signature(target).parameters:
        # Where it is in a problem's module; "" for the module itself, which has a seed of its problem's own.
        settings.setdefault("place", re.sub(r"^problems\.[^.]+\.module\.?", "", key))
    assert "_args_" not in node or node["_target_"] in CONTAINERS, f"{key}: _args_ is unchecked"
    arguments: list[Any] = instantiate(f"{key}._args_", list(node.get("_args_", ())), **context)
    if context:
        from mlotool.spaces.building import taken

        settings |= taken(context, inspect.signature(target).parameters, settings)
    return target, arguments, settings


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
        frame, is_out_of_memory = user_code.user_frame(error), user_code.is_out_of_memory(error)
        # Code of the user's may fail in what it inherits, too.
        is_inside = user_code.is_of_user(target) and error.__traceback__ is not None and error.__traceback__.tb_next
        # What a space raises itself, outside of a model's or a mutator's code, is none of its settings' faults.
        is_spaces = target.__module__.startswith("mlotool.spaces.") and frame is None
        kind = RefusedError if user_code.is_refusal(error) and not is_spaces else ConfigError
        advice = f"Correct it, or the values under {key}."
        if frame is not None or (is_inside and not is_out_of_memory):
            user_code.note(error, lambda: user_code.Call(key, target, advice=advice))
            raise kind(user_code.explained(error)) from error
        name, reason = f"{target.__module__}.{target.__qualname__}", f"{type(error).__name__}: {error}"
        if is_out_of_memory:
            raise ConfigError(
                f"{key}: {name} cannot be built ({reason.rstrip(': .')}). {user_code.MORE_MEMORY}"
            ) from error
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = f" (in {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise kind(f"{key}: {name} does not accept its settings: {reason}{where}. {advice}") from error
