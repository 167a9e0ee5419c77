"""A table that fits a width: columns are shortened and left out in the order of their worth, words never broken."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.table import Table

from mlotool.core.messages import escape

GAP = 2
SHORTEST = 8


@dataclass
class FittedColumn:
    """A column.

    Args:
        head: its name.
        cells: a text each row.
        is_right: whether it is flush right.
        is_needed: whether it stays whole, however narrow the table is.
    """

    head: str
    cells: Sequence[str]
    is_right: bool = False
    is_needed: bool = False

    def __post_init__(self) -> None:
        # On one line each, and without what a terminal obeys.
        self.head = _one_line(self.head)
        self.cells = [_one_line(cell) for cell in self.cells]

    @property
    def width(self) -> int:
        """The width of its widest text."""
        return max([cell_len(self.head), *map(cell_len, self.cells)])


def fitted_table(columns: Sequence[FittedColumn], width: int, drop_first: Sequence[int]) -> tuple[Table, list[str]]:
    """Return a table of at most `width` characters, and the names of the columns that it has no room for.

    Args:
        columns: from left to right; of those that are not needed, the left ones are worth more.
        width: of the terminal.
        drop_first: the places of columns that are worth least.
    """
    kept = list(range(len(columns)))
    widths = {place: columns[place].width for place in kept}
    dropped: list[str] = []
    worthless = [place for place in drop_first if not columns[place].is_needed]
    optional = [place for place in kept if not columns[place].is_needed and place not in worthless]

    def excess() -> int:
        return sum(widths[place] for place in kept) + GAP * (len(kept) - 1) - width

    for place in worthless:
        if excess() > 0:
            kept.remove(place)
    while optional and excess() > 0:
        widest = max(optional, key=lambda place: widths[place])
        if widths[widest] > SHORTEST:
            widths[widest] = max(SHORTEST, widths[widest] - excess(), _second(widths, optional))
        else:
            last = optional.pop()
            kept.remove(last)
            dropped.insert(0, columns[last].head)
            # What the others had given up may have room again.
            for place in optional:
                widths[place] = columns[place].width
    return _table([columns[place] for place in kept], [widths[place] for place in kept]), dropped


def _second(widths: dict[int, int], places: Sequence[int]) -> int:
    """Return how narrow the widest column may become before it is the turn of the next one, or one less."""
    ordered = sorted(widths[place] for place in places)
    second = ordered[-2] if len(ordered) > 1 else 0
    return min(second, ordered[-1] - 1)


def _table(columns: Sequence[FittedColumn], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(_cut(column.head, width), justify="right" if column.is_right else "left", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(_cut(cell, width) for cell, width in zip(row, widths, strict=True)))
    return table


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"


def _one_line(text: str) -> str:
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")
