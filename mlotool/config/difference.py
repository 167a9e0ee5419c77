"""What differs between two configs, where a run is to go on with another one than it began with. No torch."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mlotool.config.objective import objective_direction
from mlotool.config.schema import defaults_at

MAY_DIFFER = (
    "resume",
    "decisions_from",
    "runner.max_ticks",
    "runner.checkpoint_seconds",
    "runner.keep_checkpoints",
    "runner.progress_bar",
    "runner.report",
    "logger.*",
    "debug.limit_ticks",
    "problems.*.stream.num_workers",
)
"""What a resumed run may change: how long it goes on, what is kept and shown. None of it changes a tick."""

_ABSENT = "nothing"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys, with both values, in which two plain configs differ; those of MAY_DIFFER aside.

    A key that only one of them has counts with the schema's default in the other: an older version wrote fewer.

    Example:
        >>> differences({"seed": 0, "runner": {"max_ticks": 5}}, {"seed": 1, "runner": {"max_ticks": 9}})
        ['seed: 0 there, 1 here']
    """
    before, now = ({**dict(_leaves(each)), **_direction(each)} for each in (old, new))
    found = []
    for key in sorted({*before, *now}):
        if may_differ(key):
            continue
        a, b = (_value(side, key) for side in (before, now))
        if a != b or type(a) is not type(b):
            found.append(f"{key}: {a!r} there, {b!r} here")
    return found


def may_differ(key: str) -> bool:
    """Say whether a resumed run may have another value at a dotted key."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER)


def _direction(config: Mapping[str, Any]) -> dict[str, Any]:
    # Older versions wrote out what is derived now.
    return {"objective_mode": objective_direction(config)}


def _value(leaves: Mapping[str, Any], key: str) -> Any:
    if key in leaves:
        return leaves[key]
    parent, _, name = key.rpartition(".")
    return defaults_at(parent).get(name, _ABSENT)


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node
