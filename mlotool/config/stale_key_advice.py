"""Where a key that does not fit its target comes from: usually it is left over from another option of a group."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlotool.config.options import option_file, own_options
from mlotool.config.paths import package_dir
from mlotool.config.reading import MAX_RECIPE_NODES, read_document
from mlotool.config.schema import OPTION_GROUPS
from mlotool.config.sources import loaded_recipes
from mlotool.core.errors import ConfigError

GROUP_OF = {"module": "model"}
"""By kind of node, the group of its options, where it has another name."""


def leftover_advice(key: str, kind: str | None, target: str, keyword: str) -> str:
    """Return what to do about a keyword that its target does not know; names both sources where they are found.

    Args:
        key: of the node.
        kind: of the node.
        target: the value of its `_target_`.
        keyword: the unknown one.
    """
    path = f"{key}.{keyword}"
    setters = [each.path for each in reversed(loaded_recipes()) if _has(each.data, path)]
    options = _options_with(GROUP_OF.get(kind or "", kind or ""), target)
    if not setters:
        return ""
    where = f"It is set in {setters[-1]}"
    if options:
        where += f", while {target} comes from {' or '.join(options)}: a left-over of another choice"
    return f"{where}. Remove it there, drop it with ~{path}, or choose an option that takes it."


def _options_with(group: str, target: str) -> list[str]:
    if group not in OPTION_GROUPS:
        return []
    own = (option_file(group, name) for name in own_options(group))
    files = [*sorted((package_dir("conf") / group).glob("*.yaml")), *(each.absolute() for each in own if each)]
    return [f"{group}={file.stem}" for file in files if _load(file).get("_target_") == target]


@lru_cache(maxsize=256)
def _load(file: Path) -> Mapping[str, Any]:
    try:
        return read_document(file, is_fast=True, max_nodes=MAX_RECIPE_NODES).data
    except ConfigError:
        return {}


def _has(node: Any, path: str) -> bool:
    return any(True for _ in _walk(node, path.split(".")))


def _walk(node: Any, parts: list[str]) -> Iterator[Any]:
    for part in parts:
        if not isinstance(node, Mapping) or part not in node:
            return
        node = node[part]
    yield node
