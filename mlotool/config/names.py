"""What names look like."""

import re
from typing import Any

MAX_NAME = 100
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def is_plain_name(name: Any) -> bool:
    """Say whether `name` can name a folder: it neither leaves its parent nor hides."""
    return isinstance(name, str) and len(name) <= MAX_NAME and _PLAIN.fullmatch(name) is not None


def name_fault(name: Any) -> str | None:
    """Return what was found and expected where a run's `name` can name no folder; None where it can."""
    if is_plain_name(name):
        return None
    if isinstance(name, str) and len(name) > MAX_NAME:
        return f"found {len(name)} characters, {name[:20]!r}...; expected at most {MAX_NAME}, as it names a folder"
    return f"found {name!r}; expected letters, digits, '-', '_' and '.', as it names the output folder"


def is_identifier(name: Any) -> bool:
    """Say whether `name` can name a problem: it stands in keys, metrics and graphs."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None
