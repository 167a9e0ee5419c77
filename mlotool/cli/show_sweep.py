"""What a sweep says at its end, and `mlotool report` of one: tables that fit the terminal."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlotool.cli.terminal import TableColumn, fitted_table, nearby, plain_console, print_lines, warn
from mlotool.core.errors import MlotoolError

if TYPE_CHECKING:
    from rich.console import Console

    from mlotool.report.sweep import Comparison, SweepRow


MAX_SETTINGS, MAX_ERRORS, MAX_COLUMNS = 20, 5, 40
# Jobs in the table; of more the best ones.
MAX_ROWS = 200


def show_sweep(sweep_dir: Path, console: "Console | None" = None) -> bool:
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
    print_lines(console, _errors(comparison))
    console.print()
    told = (front_lines(comparison), comparison.notes, fusion_lines(sweep_dir), warning_lines(sweep_dir))
    print_lines(console, [_verdict(comparison), *(line for lines in told for line in lines)])
    console.print()
    # The jobs are done: a file that cannot be written must not hide what they have found.
    writers = {"table": write_sweep_summary, "page": write_sweep_page}
    written = [
        _write(console, sweep_dir, name, partial(writer, sweep_dir, comparison)) for name, writer in writers.items()
    ]
    return all(written)


def _write(console: "Console", sweep_dir: Path, name: str, writer: Callable[[], Path]) -> bool:
    try:
        console.print(f"sweep {name:<7}{nearby(writer())}", soft_wrap=True)
    except Exception as error:
        reason = str(error) if isinstance(error, MlotoolError) else f"{type(error).__name__}: {error}"
        warn(f"the {name} could not be written ({reason}); try again: mlotool report {nearby(sweep_dir)}")
        return False
    return True


def _errors(comparison: "Comparison") -> Iterable[str]:
    from mlotool.report.search import infeasible_lines
    from mlotool.report.sweep import INFEASIBLE

    yield from infeasible_lines(comparison.rows)
    failed = [row for row in comparison.rows if row.error and row.status != INFEASIBLE]
    yield from (f"job {row.job} failed: {row.error}" for row in failed[:MAX_ERRORS])
    if len(failed) > MAX_ERRORS:
        yield f"{len(failed) - MAX_ERRORS} more jobs failed: see sweep.csv."
    without = [row.job for row in comparison.rows if _is_without_value(row)]
    if without:
        some = ", ".join(without[:MAX_ERRORS]) + (", .." if len(without) > MAX_ERRORS else "")
        yield f"{len(without)} jobs finished without a value of the objective, or with nan: {some}. See log.txt."


def _print_jobs(console: "Console", comparison: "Comparison") -> None:
    from mlotool.report.formats import duration
    from mlotool.report.search import jobs_on_front
    from mlotool.report.sweep import labels, shown

    rows = comparison.rows
    if len(rows) > MAX_ROWS:
        worth_most = [row.job for setting in comparison.ordered for row in setting.rows][:MAX_ROWS]
        rows = tuple(row for row in rows if row.job in worth_most)
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys][:MAX_COLUMNS]
    on_front = jobs_on_front(comparison)

    def status(row: "SweepRow") -> str:
        is_best, is_front, is_empty = row.job in comparison.best_jobs, row.job in on_front, _is_without_value(row)
        marks = ["best"] * is_best + ["front"] * is_front + ["no value"] * is_empty
        return ", ".join([row.status, *marks])

    values = [row.value if row.objective == comparison.objective else None for row in rows]
    columns = [
        TableColumn("job", [row.job for row in rows], is_needed=True),
        *(TableColumn(label, [shown(row.parameters.get(key)) for row in rows]) for key, label in labels(keys).items()),
        TableColumn(comparison.objective, [_short(value) for value in values], is_right=True, is_needed=True),
        *_second_column(comparison, [row.number(comparison.plan.second_objective) for row in rows]),
        TableColumn("status", [status(row) for row in rows], is_needed=True),
        TableColumn("time", [duration(row.seconds) for row in rows], is_right=True),
    ]
    _print_table(console, columns)
    left = len(comparison.rows) - len(rows)
    if left:
        console.print(f"{left} more jobs are in sweep.csv; these are the best.")


def _is_without_value(row: "SweepRow") -> bool:
    return row.status == "finished" and bool(row.objective) and row.value is None


def _second_column(comparison: "Comparison", values: "Sequence[float | None]") -> list[TableColumn]:
    """Return the column of a second objective; none where there is one."""
    key = comparison.plan.second_objective
    # The problem's name says no more where there is room for little.
    label = "num_parameters" if key.endswith("/num_parameters") else key
    texts = [_short(value, 15 if value is not None and float(value).is_integer() else 4) for value in values]
    return [TableColumn(label, texts, is_right=True, is_needed=True)] if key else []


def _print_settings(console: "Console", comparison: "Comparison") -> None:
    from mlotool.report.search import second_mean
    from mlotool.report.sweep import shown

    ordered, best = comparison.ordered[:MAX_SETTINGS], comparison.best
    columns = [
        *(
            TableColumn(column.label, [shown(setting.parameters.get(column.key)) for setting in ordered])
            for column in comparison.columns[:MAX_COLUMNS]
        ),
        TableColumn(f"{comparison.objective}, mean", [_short(setting.mean) for setting in ordered], True, True),
        TableColumn("± std. error", [_short(setting.standard_error, 2) for setting in ordered], True, True),
        *_second_column(comparison, [second_mean(comparison, setting.rows) for setting in ordered]),
        TableColumn("seeds", [f"{len(one.values)} of {one.num_planned}" for one in ordered], is_needed=True),
        TableColumn("", ["best" if setting is best else "" for setting in ordered], is_needed=True),
        TableColumn("jobs", [setting.jobs for setting in ordered]),
    ]
    console.print()
    _print_table(console, columns)
    left = len(comparison.settings) - len(ordered)
    if left:
        console.print(f"{left} more settings are in settings.csv.")


def _print_table(console: "Console", columns: Sequence[TableColumn]) -> None:
    table, dropped = fitted_table(columns, console.width)
    console.print(table)
    if dropped:
        print_lines(console, [f"No room for {', '.join(dropped)}: see sweep.csv, or a wider window."])


def _verdict(comparison: "Comparison") -> str:
    """Return what came out, in a sentence."""
    from mlotool.report.sweep import mean_text, seeds

    setting, better = comparison.best or comparison.only, comparison.direction
    if setting is None or setting.mean is None:
        return ""
    words, best = comparison.describe(setting), "" if comparison.best is None else "best"
    if not comparison.has_seeds:
        which = f"{best}: " if best else ""
        text = f"{which}job {setting.jobs}, {comparison.objective} {mean_text(setting)} ({better}): {words}"
        return text if best or words else ""
    meaning = "mean ± standard error of " if setting.standard_error is not None else ""
    text = f"{comparison.objective} {mean_text(setting)} ({meaning}{seeds(setting)}; {better})"
    return f"{f'{best} setting: ' if best else ''}{text}{f': {words}' if words else ''}"


def _short(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"
