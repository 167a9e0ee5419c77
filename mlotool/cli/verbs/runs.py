"""List the runs below a folder, one row each, including jobs of sweeps. No code runs, and no link is followed.

  mlotool runs                                  all below outputs/, the newest first
  mlotool runs --name 'mwn*' --status finished --sort objective
  mlotool runs --where seed=1 --where problems.classifier.optimizer.lr=0.1
  mlotool runs outputs/mwn --sweeps             a sweep is one row: its best setting
  mlotool runs --json | jq '.[0].folder'        every field, for programs

The objective is the value at the best checkpoint, where one is kept; for a sweep over seeds, the mean. A folder that
cannot be read has a row that says so.
"""

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool.cli.arguments import VerbParser
from mlotool.cli.terminal import nearby, plain_console, print_lines, print_table
from mlotool.core.errors import ConfigError

if TYPE_CHECKING:
    from mlotool.report.runs import RunRow

DEFAULT_FOLDER, DEFAULT_LIMIT, MAX_FAULTS = "outputs", 100, 5
SORTS = ("date", "objective", "time")


def main(words: list[str]) -> int:
    """Print the table, or JSON."""
    parser = VerbParser("runs", __doc__)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path(DEFAULT_FOLDER),
                        help="where to look; outputs by default")  # fmt: skip
    parser.add_argument("--name", metavar="GLOB", help="runs of these recipes alone: 'mwn*'")
    parser.add_argument("--status", metavar="STATUS", help="finished, failed, interrupted, running, unfinished, ...")
    parser.add_argument("--where", metavar="KEY=VALUE", action="append", default=[],
                        help="runs with this value of a setting; may be given more than once")  # fmt: skip
    parser.add_argument("--sort", choices=SORTS, default="date", help="newest, best or longest first; date by default")
    parser.add_argument("--sweeps", action="store_true", help="one row per sweep")
    parser.add_argument("--limit", metavar="N", type=int, default=DEFAULT_LIMIT, help="rows of the table; 0: all")
    parser.add_argument("--json", action="store_true", help="print all rows as JSON")
    arguments = parser.parse(words)
    pairs = [_pair(word) for word in arguments.where]
    from mlotool.report import runs

    rows = [row for row in runs.find_runs(arguments.folder) if _is_wanted(row, arguments.name, arguments.status)]
    # The last, as it may read a config.
    rows = [row for row in rows if all(row.has(key, value) for key, value in pairs)]
    rows = runs.summarized(rows) if arguments.sweeps else rows
    keys: dict[str, Callable[[RunRow], Any]] = {"objective": runs.by_objective, "time": _longest, "date": _newest}
    rows.sort(key=_newest)
    rows.sort(key=keys[arguments.sort])
    if arguments.json:
        print(json.dumps([row.record for row in rows], indent=2))
    else:
        _show(rows, arguments.limit or len(rows))
    return 0


def _pair(word: str) -> tuple[str, str]:
    key, sign, value = word.partition("=")
    if not sign or not key:
        raise ConfigError(f"--where: found '{word}'; expected KEY=VALUE, such as seed=1. Correct it.")
    return key.lstrip("+"), value


def _is_wanted(row: "RunRow", name: str | None, status: str | None) -> bool:
    return (name is None or fnmatchcase(row.name, name)) and status in (None, row.status)


def _longest(row: "RunRow") -> float:
    return -(row.training_s or 0.0)


def _newest(row: "RunRow") -> tuple[int, ...]:
    # Dates are texts that sort as they follow each other.
    return tuple(-ord(letter) for letter in row.started) or (0,)


def _show(rows: "Sequence[RunRow]", limit: int) -> None:
    from mlotool.report.formats import NONE, duration, number

    console = plain_console()
    if not rows:
        console.print("no runs there, or none that the options ask for")
        return
    shown = rows[:limit]
    at = ["" if row.best_tick is None else str(row.best_tick) for row in shown]
    columns = [
        ("name", [row.name for row in shown], True),
        ("objective", [row.objective or NONE for row in shown], False),
        ("value", [number(row.value) for row in shown], True),
        ("at tick", at, True),
        ("status", [row.status for row in shown], True),
        ("ticks", [number(row.num_ticks) for row in shown], True),
        ("training", [duration(row.training_s) for row in shown], True),
        ("started", [row.started[:16].replace("T", " ") or NONE for row in shown], True),
        ("folder", [nearby(row.folder) for row in shown], False),
    ]
    print_table(console, columns)
    more = [f"... and {len(rows) - limit} more; --limit 0 shows all"] if len(rows) > limit else []
    faults = [row for row in rows if row.fault]
    more += [f"{nearby(row.folder)}: {row.fault}" for row in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        more.append(f"... and {len(faults) - MAX_FAULTS} more that could not be read; --json has them")
    print_lines(console, more)
