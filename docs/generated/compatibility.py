"""The tables of docs/compatibility.md: `python -m docs.generated.compatibility` writes them."""

import re

from mlotool.problem.compatibility import FUSE, LEFT_OUT, REFUSED, TRACE

_WORDS = {
    **dict.fromkeys(("name", "solution"), "the problem"),
    **dict.fromkeys(("reader", "read", "tasks"), "another problem"),
    "algorithm": "the hypergradient",
    "optimizer": "the optimizer",
}


def page() -> str:
    """Return the tables of docs/compatibility.md."""
    refused = [(row.first, row.second, f"`{row.key}`", row.expected, row.reason) for row in REFUSED]
    left = [(first, *("x" if use in uses else "" for use in (TRACE, FUSE)), why) for first, uses, why in LEFT_OUT]
    headers = ("this", "with", "change", "to", "because"), ("this", TRACE, FUSE, "because")
    tables = []
    for header, rows in ((headers[0], refused), (headers[1], left)):
        tables.append("".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows)))
    return re.sub(r"'?\{(\w+)\}'?", lambda match: _WORDS[match[1]], "\n".join(tables))


if __name__ == "__main__":
    print(page(), end="")
