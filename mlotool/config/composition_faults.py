"""What does not fit the schema in each file, so that a composition that fails can go on without it and say all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlotool.config.schema import ROOT_KEYS, Config, is_container, keys_at
from mlotool.core.messages import MAX_FAULTS

Place = tuple[str, ...]
_collected: ContextVar[dict[str, None] | None] = ContextVar("collected", default=None)


@contextmanager
def collected_faults() -> Iterator[dict[str, None]]:
    """Let files be loaded without what does not fit the schema; yield the messages, as the keys of a dict."""
    faults: dict[str, None] = {}
    token = _collected.set(faults)
    try:
        yield faults
    finally:
        _collected.reset(token)


def is_collecting() -> bool:
    """Say whether files are to be loaded without what does not fit."""
    return _collected.get() is not None


def unfit_places(origin: str, content: Mapping[str, Any]) -> list[Place]:
    """Return the places of a file's content that do not fit the schema, and note what is wrong with each.

    Args:
        origin: what the file is called in messages.
        content: plain values, from the root of the config on.
    """
    noted = _collected.get()
    assert noted is not None, "only where faults are collected"
    unknown, known = dict[Place, str](), list[tuple[Place, Any]]()
    for place, value, message in _walk(content, ()):
        if message is None:
            known.append((place, value))
        else:
            unknown[place] = message
    wrong = dict(list((unknown | dict(_type_faults(known, MAX_FAULTS))).items())[:MAX_FAULTS])
    noted.update((f"{origin}: {message}", None) for message in wrong.values())
    return [*unknown, *wrong]


def remove(config: Any, places: Sequence[Place]) -> None:
    """Remove places of a config that nobody else holds."""
    for *parents, key in places:
        node = config
        for parent in parents:
            node = node._get_node(parent) if OmegaConf.is_dict(node) and parent in node else None
        if OmegaConf.is_dict(node) and key in node:
            del node[key]


def _walk(node: Mapping[str, Any], place: Place) -> Iterator[tuple[Place, Any, str | None]]:
    # Imported here: messages name recipes, whose loader asks this module.
    from mlotool.config.translation import unknown_key, unknown_root_key

    path = ".".join(place)
    known = keys_at(path) if place else (*ROOT_KEYS, "hydra")
    for key, value in node.items():
        inner = (*place, key)
        if known and key not in known:
            yield inner, value, unknown_key(".".join(map(str, inner)), known) if place else unknown_root_key(str(key))
        elif isinstance(value, Mapping) and value and is_container(".".join(map(str, inner))):
            yield from _walk(value, inner)
        elif inner != ("hydra",):
            yield inner, value, None


def _type_faults(leaves: Sequence[tuple[Place, Any]], most: int) -> list[tuple[Place, str]]:
    """Return the leaves whose values are of a wrong type, with messages; by halves, as most files have few."""
    from mlotool.config.translation import translate

    error = _merge_error(leaves)
    if error is None or most < 1:
        return []
    if len(leaves) == 1:
        return [(leaves[0][0], str(translate(error)))]
    half = len(leaves) // 2
    first = _type_faults(leaves[:half], most)
    return [*first, *_type_faults(leaves[half:], most - len(first))]


def _merge_error(leaves: Sequence[tuple[Place, Any]]) -> OmegaConfBaseException | TypeError | None:
    tree: dict[str, Any] = {}
    for place, value in leaves:
        node = tree
        for part in place[:-1]:
            node = node.setdefault(part, {})
        node[place[-1]] = value
    try:
        OmegaConf.merge(OmegaConf.structured(Config), tree)
    # OmegaConf 2.4 raises a TypeError of its own for a list in the place of a mapping.
    except (OmegaConfBaseException, TypeError) as error:
        return error
    return None
