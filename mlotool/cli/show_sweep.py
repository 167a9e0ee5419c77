"""What a sweep says at its end, and `mlotool report` of one: tables that fit the terminal."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mlotool.cli.fitted_table import FittedColumn, fitted_table
from mlotool.cli.show_result import nearby, plain_console
from mlotool.core.errors import MlotoolError
from mlotool.core.escape import escape

if TYPE_CHECKING:
    from mlotool.report.sweep import Comparison, SweepRow

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
