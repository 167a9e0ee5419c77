"""Where a key that does not fit its target comes from: usually it is left over from another option of a group."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mlotool.config.paths import package_dir
from mlotool.config.sources import loaded_recipes

_GROUP_OF = {"module": "model"}


def leftover_advice(key: str, kind: str | None, target: str, keyword: str) -> str:
    """Return what to do about a keyword that its target does not know; names both sources where they are found.

    Args:
        key: of the node.
        kind: of the node.
        target: the value of its `_target_`.
        keyword: the unknown one.
    """
    path = f"{key}.{keyword}"
    setters = [file for file in loaded_recipes() if _has(_load(file), path)]
    options = _options_with(_GROUP_OF.get(kind or "", kind or ""), target)
    if not setters:
        return ""
    where = f"It is set in {setters[-1]}"
    if options:
        where += f", while {target} comes from {' or '.join(options)}: a left-over of another choice"
    return f"{where}. Remove it there, drop it with ~{path}, or choose an option that takes it."


def _options_with(group: str, target: str) -> list[str]:
    folder = package_dir("conf") / group
    if not group or not folder.is_dir():
        return []
    return [f"{group}={file.stem}" for file in sorted(folder.glob("*.yaml")) if _load(file).get("_target_") == target]


def _load(file: Path) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def _has(node: Any, path: str) -> bool:
    return any(True for _ in _walk(node, path.split(".")))


def _walk(node: Any, parts: list[str]) -> Iterator[Any]:
    for part in parts:
        if not isinstance(node, Mapping) or part not in node:
            return
        node = node[part]
    yield node
