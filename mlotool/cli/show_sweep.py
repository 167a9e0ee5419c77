"""What a sweep says at its end, and `mlotool report` of one: tables that fit the terminal."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table

from mlotool.cli.job import nearby, plain_console
from mlotool.core.errors import MlotoolError
from mlotool.core.messages import escape

if TYPE_CHECKING:
    from mlotool.report.sweep import Comparison, SweepRow


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


MAX_SETTINGS = 20
MAX_ERRORS = 5
MAX_COLUMNS = 40
MAX_ROWS = 200
"""Jobs in the table; of more the best ones."""


def show_sweep(sweep_dir: Path, console: Console | None = None) -> bool:
    """Print one row a job and one a setting, and the best; write sweep.csv, settings.csv and sweep.html.

    Returns:
        whether all of them could be written.
    """
    from mlotool.report import write_sweep_page, write_sweep_summary
    from mlotool.report.search import front_lines
    from mlotool.report.sweep import compare
    from mlotool.report.sweep_fusion import fusion_lines, warning_lines

    console = console or plain_console()
    comparison = compare(sweep_dir)
    console.print()
    if comparison.rows:
        _print_jobs(console, comparison)
    else:
        console.print("no job of this sweep has begun, or all of their folders were removed")
    if comparison.has_seeds and len(comparison.settings) > 1:
        _print_settings(console, comparison)
    _print_errors(console, comparison)
    console.print()
    _print_lines(
        console,
        [
            _verdict(comparison),
            *front_lines(comparison),
            *comparison.notes,
            *fusion_lines(sweep_dir),
            *warning_lines(sweep_dir),
        ],
    )
    console.print()
    # The jobs are done: a file that cannot be written must not hide what they have found.
    writers = {"table": write_sweep_summary, "page": write_sweep_page}
    written = [
        _write(console, sweep_dir, name, partial(writer, sweep_dir, comparison)) for name, writer in writers.items()
    ]
    return all(written)


def _write(console: Console, sweep_dir: Path, name: str, writer: Callable[[], Path]) -> bool:
    try:
        console.print(f"sweep {name:<7}{nearby(writer())}", soft_wrap=True)
    except Exception as error:
        reason = str(error) if isinstance(error, MlotoolError) else f"{type(error).__name__}: {error}"
        text = f"the {name} could not be written ({reason}); try again: mlotool report {nearby(sweep_dir)}"
        print(escape(f"mlotool: warning: {text}"), file=sys.stderr)
        return False
    return True


def _print_errors(console: Console, comparison: "Comparison") -> None:
    from mlotool.report.search import infeasible_lines
    from mlotool.report.sweep import INFEASIBLE

    _print_lines(console, infeasible_lines(comparison.rows))
    failed = [row for row in comparison.rows if row.error and row.status != INFEASIBLE]
    lines = [f"job {row.job} failed: {row.error}" for row in failed[:MAX_ERRORS]]
    if len(failed) > MAX_ERRORS:
        lines.append(f"{len(failed) - MAX_ERRORS} more jobs failed: see sweep.csv.")
    without = [row.job for row in comparison.rows if _is_without_value(row)]
    if without:
        some = ", ".join(without[:MAX_ERRORS]) + (", .." if len(without) > MAX_ERRORS else "")
        lines.append(
            f"{len(without)} jobs finished without a value of the objective, or with nan: {some}. See log.txt."
        )
    _print_lines(console, lines)


def _print_jobs(console: Console, comparison: "Comparison") -> None:
    from mlotool.report.formats import duration
    from mlotool.report.search import jobs_on_front
    from mlotool.report.sweep import labels, shown

    rows = _worth_most(comparison)
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys][:MAX_COLUMNS]
    names = labels(keys)
    best = () if comparison.best is None else {row.job for row in comparison.best.rows}
    on_front = jobs_on_front(comparison)
    marks = {
        row.job: ["best"] * (row.job in best)
        + ["front"] * (row.job in on_front)
        + ["no value"] * _is_without_value(row)
        for row in rows
    }
    values = [row.value if row.objective == comparison.objective else None for row in rows]
    columns = [
        FittedColumn("job", [row.job for row in rows], is_needed=True),
        *(FittedColumn(names[key], [shown(row.parameters.get(key)) for row in rows]) for key in keys),
        FittedColumn(comparison.objective, [_short(value) for value in values], is_right=True, is_needed=True),
        *_second_column(comparison, [row.number(comparison.plan.second_objective) for row in rows]),
        FittedColumn("status", [", ".join([row.status, *marks[row.job]]) for row in rows], is_needed=True),
        FittedColumn("time", [duration(row.seconds) for row in rows], is_right=True),
    ]
    _print_table(console, columns, drop_first=[len(columns) - 1])
    left = len(comparison.rows) - len(rows)
    if left:
        console.print(f"{left} more jobs are in sweep.csv; these are the best.")


def _is_without_value(row: "SweepRow") -> bool:
    return row.status == "finished" and bool(row.objective) and row.value is None


def _second_column(comparison: "Comparison", found: "Sequence[float | None]") -> list[FittedColumn]:
    """Return the column of a second objective; none where there is one."""
    key = comparison.plan.second_objective
    values = [None if each is None else float(each) for each in found]
    # The problem's name says no more where there is room for little.
    label = "num_parameters" if key.endswith("/num_parameters") else key
    texts = [f"{value:.0f}" if value is not None and value.is_integer() else _short(value) for value in values]
    return [FittedColumn(label, texts, is_right=True, is_needed=True)] if key else []


def _worth_most(comparison: "Comparison") -> "Sequence[SweepRow]":
    """Return the jobs that the table has room for, in the order of their numbers."""
    rows = comparison.rows
    if len(rows) <= MAX_ROWS:
        return rows
    ordered = [row.job for setting in comparison.ordered for row in setting.rows]
    kept = set(ordered[:MAX_ROWS])
    return [row for row in rows if row.job in kept]


def _print_settings(console: Console, comparison: "Comparison") -> None:
    from mlotool.report.search import second_mean
    from mlotool.report.sweep import shown

    ordered = comparison.ordered[:MAX_SETTINGS]
    columns = [
        *(
            FittedColumn(column.label, [shown(each.parameters.get(column.key)) for each in ordered])
            for column in comparison.columns[:MAX_COLUMNS]
        ),
        FittedColumn(f"{comparison.objective}, mean", [_short(each.mean) for each in ordered], True, True),
        FittedColumn("± std. error", [_short(each.standard_error, 2) for each in ordered], True, True),
        *_second_column(comparison, [second_mean(comparison, each.rows) for each in ordered]),
        FittedColumn("seeds", [f"{len(each.values)} of {each.num_planned}" for each in ordered], False, True),
        FittedColumn("", ["best" if each is comparison.best else "" for each in ordered], False, True),
        FittedColumn("jobs", [each.jobs for each in ordered]),
    ]
    console.print()
    _print_table(console, columns, drop_first=[len(columns) - 1])
    left = len(comparison.settings) - len(ordered)
    if left:
        console.print(f"{left} more settings are in settings.csv.")


def _print_table(console: Console, columns: list[FittedColumn], drop_first: list[int]) -> None:
    table, dropped = fitted_table(columns, console.width, drop_first)
    console.print(table)
    if dropped:
        _print_lines(console, [f"No room for {', '.join(dropped)}: see sweep.csv, or a wider window."])


def _verdict(comparison: "Comparison") -> str:
    """Return what came out, in a sentence."""
    from mlotool.report.sweep import mean_text, seeds

    setting = comparison.best or comparison.only
    if setting is None or setting.mean is None:
        return ""
    better = comparison.direction
    words = comparison.describe(setting)
    if not comparison.has_seeds:
        if comparison.best is None and not words:
            return ""
        which = "best: " if comparison.best is not None else ""
        return f"{which}job {setting.jobs}, {comparison.objective} {mean_text(setting)} ({better}): {words}"
    meaning = "mean ± standard error of " if setting.standard_error is not None else ""
    found = f"{comparison.objective} {mean_text(setting)} ({meaning}{seeds(setting)}; {better})"
    return f"{'' if comparison.best is None else 'best setting: '}{found}{f': {words}' if words else ''}"


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        if line:
            console.print(escape(line), soft_wrap=True)


def _short(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"
