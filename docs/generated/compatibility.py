"""The tables of docs/compatibility.md: `python -m docs.generated.compatibility` writes them."""

import re
from collections.abc import Iterable

from mlotool.problem.compatibility import FUSE, LEFT_OUT, REFUSED, TRACE

_WORDS = {
    "name": "the problem",
    "reader": "a problem above",
    **dict.fromkeys(("read", "solution"), "the lower problem"),
    "tasks": "the problem with tasks",
    "algorithm": "the hypergradient method",
    "optimizer": "this optimizer",
}


def page() -> str:
    """Return the tables of docs/compatibility.md."""
    parts = []
    for subject, rows in REFUSED.items():
        cells = [(_code(row.first), _code(row.second), f"`{row.key}`: {row.expected}", row.reason) for row in rows]
        parts += [
            f"### {_code(subject)}\n",
            _table(("feature", "cannot be combined with", "what to set", "reason"), cells),
        ]
    left = [
        (_code(first), *("x" if use in uses else "" for use in (TRACE, FUSE)), why) for first, uses, why in LEFT_OUT
    ]
    parts.append(_table(("feature", _code(TRACE), _code(FUSE), "reason"), left))
    return re.sub(r"'?\{(\w+)\}'?", lambda match: _WORDS[match[1]], "\n".join(parts))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def _code(name: str) -> str:
    """Return a name as code where it is a key of a recipe, or a key with its value."""
    return f"`{name}`" if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*(: \w+)?", name) else name


if __name__ == "__main__":
    print(page(), end="")
