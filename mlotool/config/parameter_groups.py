"""Settings of an optimizer for some of the parameters: `groups: [{match: "classifier.*", lr: 0.01}]`. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mlotool.core.errors import ConfigError


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


KEY = "groups"
_EXAMPLE = "{match: classifier.*, lr: 0.01}"


def grouped(key: str, groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    rest = dict(parameters)
    found: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        patterns = _patterns(group)
        names = [name for name in rest if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not names:
            raise ConfigError(
                f"{key}[{index}].match: found {group['match']!r}, which no parameter that is left has; expected a "
                f"pattern for some of {', '.join(parameters)}. Correct the pattern, or remove the group."
            )
        settings = {name: _plain(value) for name, value in settings_of(group).items()}
        found.append({"params": [rest.pop(name) for name in names], **settings})
    return [{"params": list(rest.values())}, *found] if rest else found


def group_faults(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the shape of an optimizer's groups; `key` is the optimizer's."""
    groups, learned = node.get(KEY, []), optimizer_roles(node)
    if not isinstance(groups, list):
        yield f"{key}.{KEY}: found {groups!r}; expected a list. Write {key}.{KEY}: [{_EXAMPLE}]."
        return
    for index, group in enumerate(groups):
        place = f"{key}.{KEY}[{index}]"
        if not isinstance(group, Mapping) or not _patterns(group) or len(group) < 2:
            yield (
                f"{place}: found {group!r}; expected `match`, a pattern of parameter names or a list of them, and "
                f"settings of the optimizer. Write {_EXAMPLE}."
            )
            continue
        for name in group:
            if name in learned or name in optimizer_roles(group):
                yield (
                    f"{place}.{name}: found {group[name]!r}; expected no setting that a problem gives, as it gives one "
                    "for each parameter already. Remove it."
                )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one group, without what it matches."""
    return {name: value for name, value in group.items() if name != "match"}


def _patterns(group: Mapping[str, Any]) -> list[str]:
    match = group.get("match")
    patterns: list[Any] = match if isinstance(match, list) else [match]
    return patterns if all(isinstance(each, str) for each in patterns) else []


def _plain(value: Any) -> Any:
    # YAML has no tuples, and `betas` must be one for some of torch's code paths.
    return tuple(value) if isinstance(value, list) else value
