"""Paths of modules with `*` for any text within one name."""

from fnmatch import fnmatchcase


def matches(path: str, pattern: str) -> bool:
    """Say whether a path matches a pattern, name by name.

    Args:
        path: names with dots between them.
        pattern: the same, with `*` for any text within one name; `**` is any number of names.

    Example:
        >>> matches("blocks.0.norm", "blocks.*.norm"), matches("blocks.0.norm", "blocks.*"), matches("a.b.c", "**.c")
        (True, False, True)
    """
    return _matches(path.split("."), pattern.split("."))


def _matches(names: list[str], patterns: list[str]) -> bool:
    # reached[i]: the patterns so far match the first i names.
    reached = [True] + [False] * len(names)
    for pattern in patterns:
        if pattern == "**":
            first = reached.index(True) if True in reached else len(reached)
            reached = [index >= first for index in range(len(reached))]
        else:
            reached = [False] + [reached[i] and fnmatchcase(name, pattern) for i, name in enumerate(names)]
    return reached[-1]
