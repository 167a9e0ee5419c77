"""What names look like."""

import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def is_plain_name(name: Any) -> bool:
    """Say whether `name` can name a folder: it neither leaves its parent nor hides."""
    return isinstance(name, str) and len(name) <= 100 and _PLAIN.fullmatch(name) is not None


def is_identifier(name: Any) -> bool:
    """Say whether `name` can name a problem: it stands in keys, metrics and graphs."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None
