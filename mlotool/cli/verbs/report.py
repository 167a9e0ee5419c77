"""`mlotool report`: the page of a finished run; or the page and tables of a sweep."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from mlotool.cli.arguments import VerbParser
from mlotool.cli.terminal import nearby, plain_console, print_lines, print_table, warn
from mlotool.core.errors import MlotoolError
from mlotool.core.messages import escape
from mlotool.folders.run_folder import INFEASIBLE, RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report import search, sweep, sweep_page, write_report

EXIT_FAILURE = 1
# Jobs in the table (of more the best ones), settings, and hyperparameters.
MAX_ROWS, MAX_SETTINGS, MAX_ERRORS, MAX_COLUMNS = 200, 20, 5, 8


def main(words: list[str]) -> int:
    """Write the report again from what the folder holds."""
    parser = VerbParser("report", "Write report.html and its pictures of a run, or sweep.csv of a sweep, again.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run or of a sweep")
    folder = parser.parse(words).run
    if SweepFolder(folder).is_sweep and not RunFolder(folder).is_run:
        return 0 if show_sweep(folder) else EXIT_FAILURE
    print(nearby(write_report(folder)))
    return 0


def show_sweep(sweep_dir: Path, console: Console | None = None) -> bool:
    """Print one row per job and one per setting, and the best; write sweep.csv, settings.csv and sweep.html.

    Returns:
        whether all of them could be written.
    """
    console = console or plain_console()
    comparison = sweep.compare(sweep_dir)
    rows, settings = comparison.rows, comparison.ordered
    console.print()
    if rows:
        best = [row.job for setting in settings for row in setting.rows][:MAX_ROWS]
        shown = [row for row in rows if row.job in best] if len(rows) > MAX_ROWS else rows
        _print_columns(console, sweep_page.job_columns(comparison, shown))
        if len(shown) < len(rows):
            console.print(f"{len(rows) - len(shown)} more jobs are in sweep.csv; these are the best.")
    else:
        console.print("no job of this sweep has begun, or all of their folders were removed")
    if comparison.has_seeds and len(settings) > 1:
        console.print()
        _print_columns(console, sweep_page.setting_columns(comparison, settings[:MAX_SETTINGS]))
        if len(settings) > MAX_SETTINGS:
            console.print(f"{len(settings) - MAX_SETTINGS} more settings are in settings.csv.")
    failed = [row for row in rows if row.error and row.status != INFEASIBLE]
    print_lines(console, search.infeasible_lines(rows))
    print_lines(console, (f"job {row.job} failed: {row.error}" for row in failed[:MAX_ERRORS]))
    if len(failed) > MAX_ERRORS:
        console.print(f"{len(failed) - MAX_ERRORS} more jobs failed: see sweep.csv.")
    console.print()
    print_lines(console, [_verdict(comparison), *search.front_lines(comparison), *comparison.notes])
    if command := sweep.repeat_command(comparison):
        # On one line, to be copied.
        console.print(f"once more: {escape(command)}", soft_wrap=True)
    print_lines(console, [*sweep.fusion_lines(sweep_dir), *sweep.warning_lines(sweep_dir)])
    console.print()
    is_written = True
    # The jobs are done: a file that cannot be written must not hide what they have found.
    for name, write in {"table": sweep_page.write_sweep_summary, "page": sweep_page.write_sweep_page}.items():
        try:
            console.print(f"sweep {name:<7}{nearby(write(sweep_dir, comparison))}", soft_wrap=True)
        except Exception as error:
            reason = str(error) if isinstance(error, MlotoolError) else f"{type(error).__name__}: {error}"
            warn(f"the {name} could not be written ({reason}); try again: mlotool report {nearby(sweep_dir)}")
            is_written = False
    return is_written


def _print_columns(console: Console, columns: Iterable[sweep_page.TableColumn]) -> None:
    shown = [column for column in columns if sweep_page.View.TERMINAL in column.views]
    needed = [column for column in shown if column.is_needed]
    # Of the others the left ones are worth more.
    kept = [*needed, *[column for column in shown if not column.is_needed][:MAX_COLUMNS]]
    print_table(
        console, [(one.head, [one.show(value) for value in one.values], one.is_needed) for one in shown if one in kept]
    )
    if left := [column.head for column in shown if column not in kept]:
        print_lines(console, [f"No room here for the columns {', '.join(left)}: see sweep.csv."])


def _verdict(comparison: sweep.Comparison) -> str:
    """Return what came out, in a sentence."""
    setting = comparison.best or comparison.only
    if setting is None or setting.mean is None:
        return ""
    meaning = [comparison.direction]
    if comparison.has_seeds:
        error = " ± standard error" if setting.standard_error is not None else ""
        meaning.insert(0, f"mean{error} of {sweep.seeds(setting)}")
    best = "" if comparison.best is None else "best: "
    jobs = f"job{'s' if len(setting.rows) > 1 else ''} {setting.jobs}"
    words = comparison.describe(setting)
    others = "".join(f", {key} {sweep.mean_text(values)}" for key, values in setting.other_splits.items())
    text = f"{best}{jobs}, {comparison.objective} {sweep.mean_text(setting.values)}{others} ({'; '.join(meaning)})"
    return f"{text}: {words}" if words else text
