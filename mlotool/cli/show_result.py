"""What a run and a sweep say at their end."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mlotool.core.printable import printable

if TYPE_CHECKING:
    from mlotool.runner import RunResult


def show_result(config: Any, result: "RunResult", console: Console | None = None) -> None:
    """Print objective, final metrics of the evaluated splits, and where everything lies."""
    console = console or plain_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if config.objective is not None and result.objective is not None:
        table.add_row(f"objective {config.objective}", f"{result.objective:.4g}")
    evaluated = () if config.evaluate is None else config.evaluate.splits
    for key, value in sorted(result.metrics.items()):
        if key.split("/")[0] in evaluated:
            table.add_row(key, f"{value:.4g}")
    table.add_row("run folder", nearby(result.output_dir))
    if result.checkpoint is not None:
        table.add_row("checkpoint", nearby(result.checkpoint))
    report = result.output_dir / "report.html"
    if report.is_file():
        table.add_row("report", nearby(report))
    console.print()
    console.print(table)


def show_sweep(sweep_dir: Path, console: Console | None = None) -> None:
    """Print one row a job, failed ones included, and write sweep.csv and sweep.html."""
    from mlotool.report import sweep_rows, write_sweep_page, write_sweep_summary

    console = console or plain_console()
    rows = sweep_rows(sweep_dir)
    file = write_sweep_summary(sweep_dir)
    objectives = {row.objective for row in rows if row.objective}
    name = objectives.pop() if len(objectives) == 1 else "objective"
    table = Table(box=None, pad_edge=False)
    table.add_column("job")
    table.add_column("overrides", overflow="fold")
    table.add_column(printable(name), justify="right")
    table.add_column("status")
    table.add_column("folder", no_wrap=True)
    overrides = [row.overrides.split() for row in rows]
    for row, own in zip(rows, overrides, strict=True):
        # Those of every job say nothing; sweep.csv has them.
        differing = [word for word in own if len(rows) == 1 or not all(word in each for each in overrides)]
        value = "" if row.value is None else f"{row.value:.4g}"
        cells = (row.job, " ".join(differing), value, row.status)
        table.add_row(*map(printable, cells), nearby(row.folder))
    console.print()
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"job {row.job} failed: {row.error}")
    console.print(f"\nsweep table  {nearby(file)}")
    # The jobs are done: a page that cannot be written must not hide their table.
    try:
        console.print(f"sweep page   {nearby(write_sweep_page(sweep_dir))}")
    except Exception as error:
        text = f"the page could not be written ({type(error).__name__}: {error})"
        print(f"mlotool: warning: {text}; try again: mlotool report {nearby(sweep_dir)}", file=sys.stderr)


def nearby(path: Path) -> str:
    """Return a path as seen from the working directory, where it lies below."""
    path = path.absolute()
    return printable(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def plain_console() -> Console:
    """Return a console that wraps nothing where nobody watches."""
    # Overrides such as `a=[b]` are no markup.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 500  # nobody watches, so nothing is wrapped: a path in a log file is to be copied
    return console
