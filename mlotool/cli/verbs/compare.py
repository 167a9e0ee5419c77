"""Compare runs: the settings in which they differ, their metrics with the ticks, and a page with their curves.

mlotool compare outputs/mwn/2026-01-31_12-00-00 outputs/mwn/2026-01-31_13-00-00
mlotool compare outputs/mwn/multirun/2026-01-31_14-00-00/{0,3,7}    jobs of a sweep
mlotool compare A B --out pages/lr.html                             the page elsewhere; compare.html by default
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlotool.cli.arguments import VerbParser
from mlotool.cli.terminal import nearby, plain_console, print_lines, print_table
from mlotool.core.errors import ConfigError
from mlotool.folders.files import at_home

if TYPE_CHECKING:
    from rich.console import Console

    from mlotool.report.compared_runs import RunComparison

MAX_ROWS = 40


def main(words: list[str]) -> int:
    """Print the tables, and write the page."""
    parser = VerbParser("compare", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs, or of jobs of a sweep")
    parser.add_argument("--out", metavar="FILE", help="the page; compare.html in this folder by default")
    arguments = parser.parse(words)
    from mlotool.report import compared_runs

    file = at_home(arguments.out or compared_runs.PAGE)
    if file.suffix != ".html" or file.is_dir():
        raise ConfigError(f"--out: found '{arguments.out}'; expected a file that ends in .html. Correct it.")
    comparison = compared_runs.RunComparison(arguments.runs)
    console = plain_console()
    _show(console, comparison)
    console.print()
    console.print(f"page  {nearby(compared_runs.write_comparison(comparison, file))}", soft_wrap=True)
    return 0


def _show(console: "Console", comparison: "RunComparison") -> None:
    from mlotool.report.compared_runs import metric_texts, value_text

    runs, settings = comparison.runs, comparison.settings
    facts = [run.facts for run in runs]
    columns = [(name, [fact[name] for fact in facts], True) for name in facts[0]]
    print_table(
        console,
        [
            ("run", [run.letter for run in runs], True),
            *columns,
            ("folder", [nearby(run.folder) for run in runs], False),
        ],
    )
    console.print()
    if settings:
        rows = {key: [value_text(value) for value in values] for key, values in settings.items()}
        _print_rows(console, comparison, "settings that differ", rows)
    else:
        console.print("all settings are the same")
    for which, title in (("best", "best checkpoint, at tick"), ("last", "last value, at tick")):
        metrics = comparison.metrics(which)
        # Those that the problems logged while they trained stand on the page.
        rows = {key: metric_texts(values) for key, values in metrics.items() if comparison.is_evaluated(key)}
        if rows:
            console.print()
            _print_rows(console, comparison, title, rows)
    print_lines(console, [f"{run.letter}: {note}" for run in runs for note in run.run.notes])


def _print_rows(
    console: "Console", comparison: "RunComparison", title: str, rows: dict[str, list[str]] | dict[str, Sequence[str]]
) -> None:
    shown = list(rows.items())[:MAX_ROWS]
    columns = [(title, [key for key, _ in shown], True)]
    for place, run in enumerate(comparison.runs):
        columns.append((run.letter, [values[place] for _, values in shown], False))
    print_table(console, columns)
    if len(rows) > MAX_ROWS:
        console.print(f"{len(rows) - MAX_ROWS} more are on the page.")
