"""The page docs/compatibility.md; `python -m mlotool.problem.compatibility_page > docs/compatibility.md` writes it."""

import re
from collections.abc import Iterable

from mlotool.problem.compatibility_features import FEATURES
from mlotool.problem.compatibility_table import ROWS

_HEAD = """# What goes together

Features that exclude each other. These tables are those that the program itself looks up
(`mlotool/problem/compatibility_table.py`): `mlotool validate --targets` and `mlotool run` refuse a pair with the
setting that was found, what is expected and what to do. What is in no row goes together, within the ranges that each
setting's own message tells. This page is made by `python -m mlotool.problem.compatibility_page`.

## Refused
| this | with | change | to | because |
|---|---|---|---|---|
"""

_USES = ("trace", "fuse")

_WITHOUT = """
## Left out
A problem's steps are not traced, or not taken with those of other runs as one program, where one of these is marked;
the run goes on without it.

| this | {uses} | because |
|---|{lines}---|
"""

_WORDS = {"name": "the problem", "solution": "the problem", "reader": "another problem", "read": "another problem"}


def page() -> str:
    """Return the page."""
    refused = _lines(
        (_label(row.first), _label(row.second), f"`{row.key}`", _plain(row.expected), _plain(row.reason))
        for row in ROWS
        if row.is_refused
    )
    without: dict[tuple[str, str], set[str]] = {}
    for row in ROWS:
        if not row.is_refused:
            without.setdefault((row.first, row.reason), set()).add(row.second)
    left = _lines(
        (_label(first), *("x" if use in found else "" for use in _USES), _plain(reason))
        for (first, reason), found in without.items()
    )
    head = _WITHOUT.format(uses=" | ".join(map(_label, _USES)), lines="---|" * len(_USES))
    return f"{_HEAD}{refused}{head}{left}"


def _label(feature: str) -> str:
    return FEATURES[feature].label


def _plain(text: str) -> str:
    """Return a text of a row for any problem: `'{name}'` becomes "the problem"."""
    found = re.sub(r"'?\{(\w+)\}'?", lambda match: _WORDS.get(match[1], "the hypergradient"), text)
    return found.replace("|", r"\|")


def _lines(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


if __name__ == "__main__":
    print(page(), end="")
