"""What a run says at its end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mlotool.core.messages import escape

if TYPE_CHECKING:
    from mlotool.runner import RunResult


MAX_METRICS = 40


def show_result(config: Any, result: "RunResult", console: Console | None = None) -> None:
    """Print objective, final metrics of the evaluated splits, and where everything lies."""
    console = console or plain_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if config.objective is not None and result.objective is not None:
        table.add_row(f"objective {config.objective}", f"{result.objective:.4g}")
    evaluated = () if config.evaluate is None else config.evaluate.splits
    shown = {key: value for key, value in sorted(result.metrics.items()) if key.split("/")[0] in evaluated}
    for key in list(shown)[:MAX_METRICS]:
        table.add_row(key, f"{shown[key]:.4g}")
    if len(shown) > MAX_METRICS:
        table.add_row("...", f"{len(shown) - MAX_METRICS} more in metrics.csv")
    table.add_row("run folder", nearby(result.output_dir))
    if result.checkpoint is not None:
        table.add_row("checkpoint", nearby(result.checkpoint))
    report = result.output_dir / "report.html"
    if report.is_file():
        table.add_row("report", nearby(report))
    console.print()
    console.print(table)


def nearby(path: Path) -> str:
    """Return a path as seen from the working directory, where it lies below."""
    path = path.absolute()
    return escape(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def plain_console() -> Console:
    """Return a console that wraps nothing where nobody watches."""
    # Overrides such as `a=[b]` are no markup.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 500  # nobody watches, so nothing is wrapped: a path in a log file is to be copied
    return console
