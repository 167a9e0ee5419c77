"""What the verbs print: warnings and news on stderr, tables that fit the terminal on stdout."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlotool.core.messages import escape

if TYPE_CHECKING:
    # Imported where it is needed: --help is there in 0.05 s.
    from rich.console import Console


# Or a time, or what stands for nothing.
_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?( s)?|nan|-?inf|\N{EN DASH}")


# Of lines that nobody watches: nothing is wrapped or cut, as a path in a log file is to be copied.
UNWATCHED_WIDTH = 500


def say(text: str) -> None:
    """Print a line of news."""
    print(f"mlotool: {escape(text)}", file=sys.stderr, flush=True)


def warn(*texts: str) -> None:
    """Print warnings, a line each."""
    for text in texts:
        say(f"warning: {text}")


def nearby(path: Path) -> str:
    """Return a path as seen from the working directory, where it lies below."""
    path = path.absolute()
    return escape(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def plain_console() -> "Console":
    """Return a console that wraps nothing where nobody watches."""
    from rich.console import Console

    # Overrides such as `a=[b]` are no markup.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = UNWATCHED_WIDTH
    return console


def print_lines(console: "Console", lines: Iterable[str]) -> None:
    """Print lines that are not empty, each as it is."""
    for line in filter(None, lines):
        console.print(escape(line), soft_wrap=True)


def print_table(console: "Console", columns: Sequence[tuple[str, Sequence[str], bool]]) -> None:
    """Print a table that is as wide as the terminal at most.

    Args:
        console: takes it.
        columns: the head and the texts of each, and whether it stays whole where there is little room.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head, texts, is_needed in columns:
        is_number = all(map(_NUMBER.fullmatch, texts))
        # Rich takes what is too much from the widest columns that may be wrapped; their texts are cut, not wrapped.
        table.add_column(Text(one_line(head), no_wrap=True, overflow="ellipsis"), no_wrap=is_needed)
        table.columns[-1].justify = "right" if is_number else "left"
    for row in zip(*(texts for _, texts, _ in columns), strict=True):
        table.add_row(*(Text(one_line(text), no_wrap=True, overflow="ellipsis") for text in row))
    console.print(table)


def one_line(text: str) -> str:
    """Return a text on one line, and without what a terminal obeys."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")
