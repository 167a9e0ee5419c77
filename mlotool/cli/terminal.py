"""What the verbs print: warnings and news on stderr, tables that fit the terminal on stdout."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlotool.core.messages import escape

if TYPE_CHECKING:
    # Imported where it is needed: --help is there in 0.05 s.
    from rich.console import Console
    from rich.table import Table

GAP = 2
SHORTEST = 8


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
        console.width = 500  # nobody watches, so nothing is wrapped: a path in a log file is to be copied
    return console


def print_lines(console: "Console", lines: Iterable[str]) -> None:
    """Print lines that are not empty, each as it is."""
    for line in filter(None, lines):
        console.print(escape(line), soft_wrap=True)


@dataclass(frozen=True)
class TableColumn:
    """A column: its head, a text each row, whether it is flush right, and whether it stays whole in a narrow table."""

    head: str
    cells: Sequence[str]
    is_right: bool = False
    is_needed: bool = False


def fitted_table(columns: Sequence[TableColumn], width: int) -> "tuple[Table, list[str]]":
    """Return a table of at most `width` characters, and the heads of the columns that it has no room for.

    Args:
        columns: from left to right; of those that are not needed, the left ones are worth more.
        width: of the terminal.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    def cell(text: str) -> Text:
        return Text(one_line(text), no_wrap=True, overflow="ellipsis")

    widths = [max(cell_len(one_line(text)) for text in (column.head, *column.cells)) for column in columns]
    room = width + GAP - sum(size + GAP for column, size in zip(columns, widths, strict=True) if column.is_needed)
    table, kept, dropped = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0)), list[TableColumn](), list[str]()
    for column, size in zip(columns, widths, strict=True):
        room -= 0 if column.is_needed else min(size, SHORTEST) + GAP
        if room < 0 and not column.is_needed:
            dropped.append(column.head)
            continue
        kept.append(column)
        # Rich takes what is too much from the widest columns that may be wrapped; their texts are cut, not wrapped.
        table.add_column(cell(column.head), justify="right" if column.is_right else "left", no_wrap=column.is_needed)
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*map(cell, row))
    return table, dropped


def one_line(text: str) -> str:
    """Return a text on one line, and without what a terminal obeys."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")
