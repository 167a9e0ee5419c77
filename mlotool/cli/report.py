"""`mlotool report`: the page of a finished run, or the table of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.arguments import VerbParser

EXIT_FAILURE = 1


def main(words: Sequence[str]) -> int:
    """Write the report again from what the folder holds."""
    parser = VerbParser("report", "Write report.html and its pictures of a run, or sweep.csv of a sweep, again.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run or of a sweep")
    arguments = parser.parse(words)
    from mlotool.cli.show_sweep import show_sweep
    from mlotool.cli.terminal import nearby
    from mlotool.report.run_folder import is_run_folder

    is_sweep = any((arguments.run / name).is_file() for name in ("multirun.yaml", "sweep.json", "plan.json"))
    if is_sweep and not is_run_folder(arguments.run):
        return 0 if show_sweep(arguments.run) else EXIT_FAILURE
    from mlotool.report import write_report

    print(nearby(write_report(arguments.run)))
    return 0
