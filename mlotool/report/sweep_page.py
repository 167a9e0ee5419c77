"""What is written of a sweep: its page, sweep.html, with the figures beside it; and sweep.csv, settings.csv."""

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mlotool.core.messages import escape
from mlotool.core.run_files import replacing, write_text
from mlotool.report.figure import Sketchbook, report_style
from mlotool.report.formats import NONE, duration, number, shortened
from mlotool.report.graph import model_section
from mlotool.report.models import read_models
from mlotool.report.page import SIGNS, page
from mlotool.report.run_folder import SPLIT_NAMES
from mlotool.report.search import jobs_on_front, pareto_front, second_mean
from mlotool.report.sweep import (
    ENDED,
    INFEASIBLE,
    Column,
    Comparison,
    Setting,
    SweepRow,
    as_number,
    compare,
    labels,
    mean_text,
    seeds,
    shown,
)
from mlotool.report.sweep_figures import sweep_cards
from mlotool.report.sweep_fusion import fusion_lines

FILE, PAGE = "sweep.html", "report.html"
MAX_ERRORS, MAX_METRICS, MAX_COLUMNS, MAX_FRONT, MAX_TEXT = 50, 8, 40, 100, 60
# Overrides that stand in lines of their own; more of them are written one behind the other.
MAX_LINES = 10


def write_sweep_page(sweep_dir: Path, comparison: Comparison | None = None) -> Path:
    """Write sweep.html and report/*.svg from the folders of a sweep's jobs.

    Args:
        sweep_dir: the folder of a sweep, also of one that is still running.
        comparison: what `compare` has read from it, if it has.

    Returns:
        the page.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep, or its report/ is a link that leads out of it.
        WriteError: the disk does not take the page.
    """
    sweep_dir = Path(sweep_dir)
    comparison = comparison or compare(sweep_dir)
    book = Sketchbook(sweep_dir / "report")
    with report_style():
        parallel, cards = sweep_cards(book, comparison)
    rows, chosen = comparison.rows, comparison.best or comparison.only
    failed = [row for row in rows if row.error and row.status != INFEASIBLE]
    has_settings = comparison.has_seeds and len(comparison.settings) > 1
    text = page(
        "sweep.html", f"{comparison.name}: sweep", "sort_table.js", comparison=comparison, state=_state(comparison),
        tiles=_tiles(comparison), max_lines=MAX_LINES, parallel=parallel, cards=cards, has_figures=bool(book.names),
        overrides=[] if chosen is None or chosen.mean is None else comparison.overrides(chosen),
        front=_front_table(comparison), settings=_settings_table(comparison) if has_settings else None,
        jobs=_jobs_table(comparison) if rows else None, models=_models(chosen),
        command=_command(rows), failed=failed[:MAX_ERRORS], max_errors=MAX_ERRORS,
        infeasible=[row for row in rows if row.status == INFEASIBLE], together=fusion_lines(sweep_dir),
    )  # fmt: skip
    return write_text(sweep_dir, FILE, text)


def _models(setting: Setting | None) -> list[Markup]:
    """Return the models of the best job, where it has some of a space."""
    finished = [] if setting is None else [row for row in setting.rows if row.status == "finished"]
    models = ([model_section(model) for model in read_models(row.folder)[0]] for row in finished)
    return next(filter(None, models), [])


def _state(comparison: Comparison) -> tuple[str, str]:
    """Return the badge's class and text."""
    num, ended = comparison.num_jobs, comparison.num_ended
    counts = Counter(row.status for row in comparison.rows)
    if counts["running"]:
        return "running", f"running: {ended} of {num} jobs have ended"
    if ended < num:
        return "interrupted", f"not finished: {ended} of {num} jobs have ended"
    return ("failed", f"{counts['failed']} of {num} failed") if counts["failed"] else ("finished", "finished")


def _tiles(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the facts that one looks for first: what they are, the value, and a line below."""
    best, direction = comparison.best, comparison.direction
    setting = best or comparison.only
    label, value = comparison.objective, NONE
    if not comparison.rows:
        below = "no job has begun yet"
    elif setting is None or setting.mean is None:
        below = f"no job has finished with a value yet; {direction}"
    else:
        num, whose = len(comparison.ranked), "settings" if comparison.has_seeds else "jobs that finished"
        label = f"{f'best of {num} {whose}, ' if num > 1 else ''}{label}"
        error = " ± standard error" if setting.standard_error is not None else ""
        below = f"mean{error} of {seeds(setting)}; {direction}" if comparison.has_seeds else direction
        value = mean_text(setting)
    tiles: list[tuple[str, ...]] = [(label, value, below, "tile first")]
    if best is not None:
        tiles.append(("jobs of the best setting" if len(best.rows) > 1 else "best job", best.jobs))
    counts = Counter(row.status for row in comparison.rows)
    counts["not begun"] = comparison.num_jobs - len(comparison.rows)
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return [*tiles, ("jobs that have ended", f"{comparison.num_ended} of {comparison.num_jobs}", ended)]


def _command(rows: Sequence[SweepRow]) -> str:
    """Return what makes the page of the first job without one: jobs that share a process leave it to the reader."""
    without = (
        row.folder
        for row in rows
        if row.status in ENDED and (row.folder / "config.yaml").is_file() and not (row.folder / PAGE).is_file()
    )
    first = next(without, None)
    return "" if first is None else f"mlotool report {shlex.quote(_nearby(first))}"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: what it shows.
        sort: by what its column is sorted; None where the value is missing.
        title: what it says when it is pointed at.
        status: the CSS class of its colour.
        is_strong: whether it is the best one.
        is_state: whether it shows a job's state, with a sign.
        href: where it leads to.
    """

    text: str
    sort: float | str | None = None
    title: str | None = None
    status: str = ""
    is_strong: bool = False
    is_state: bool = False
    href: str = ""


@dataclass(frozen=True)
class Head:
    """The head of a column.

    Args:
        label: what it shows.
        title: what it says when it is pointed at.
        is_number: whether its column is sorted by size.
        first: the direction in which it is sorted first.
        sorted: the direction in which it is sorted now.
    """

    label: str
    title: str | None = None
    is_number: bool = False
    first: str = "ascending"
    sorted: str | None = None

    @property
    def pieces(self) -> list[str]:
        """The label, cut where it may go on in another line: after a dot, a slash or an underscore."""
        return re.split(r"(?<=[._/])(?=.)", self.label)


Table = dict[str, Any]


def _table(heads: Sequence[Head], rows: Iterable[tuple[bool, Sequence[Cell]]]) -> Table:
    """Return a table of rows, each with whether it is the best one."""
    return {"heads": heads, "rows": [{"cells": cells, "is_best": is_best} for is_best, cells in rows]}


def _objective_head(key: str, mode: str, title: str | None = None) -> Head:
    return Head(key, title, is_number=True, first="descending" if mode == "max" else "ascending")


def _parameter_heads(columns: Sequence[Column]) -> list[Head]:
    return [Head(column.label, column.key, column.numbers is not None) for column in columns]


def _settings_table(comparison: Comparison) -> Table:
    """Return all settings, the best first, those without a value last."""
    columns = comparison.columns[:MAX_COLUMNS]
    heads = [
        Head("rank", is_number=True, sorted="ascending"),
        _objective_head(comparison.objective, comparison.mode, "mean of the jobs that finished"),
        Head("± standard error", is_number=True),
        Head("seeds", "jobs that finished, of all", is_number=True),
        *_parameter_heads(columns),
        Head("jobs"),
    ]
    rows = []
    for rank, setting in enumerate(comparison.ordered, 1):
        is_best, done, planned = setting is comparison.best, len(setting.values), setting.num_planned
        rows.append((is_best, [
            Cell(f"{'★ ' if is_best else ''}{rank}" if setting.values else NONE, rank),
            _value(setting.mean, is_strong=is_best),
            _value(setting.standard_error),
            Cell(f"{done} of {planned}", done, status="" if done == planned else "interrupted"),
            *(_parameter(setting.parameters.get(column.key)) for column in columns),
            Cell(setting.jobs, setting.jobs),
        ]))  # fmt: skip
    return _table(heads, rows)


def _front_table(comparison: Comparison) -> Table | None:
    """Return the settings on the front of two objectives, the best by the first one first."""
    front, plan, columns = pareto_front(comparison)[:MAX_FRONT], comparison.plan, comparison.columns[:MAX_COLUMNS]
    heads = [
        Head("jobs"),
        _objective_head(comparison.objective, comparison.mode),
        _objective_head(plan.second_objective, plan.second_mode),
        *_parameter_heads(columns),
    ]
    rows = []
    for point in front:
        setting = point.setting
        parameters = [_parameter(setting.parameters.get(column.key)) for column in columns]
        cells = [Cell(setting.jobs, setting.jobs), _value(point.first), _value(point.second), *parameters]
        rows.append((setting is comparison.best, cells))
    return _table(heads, rows) if rows else None


def _jobs_table(comparison: Comparison) -> Table:
    """Return all jobs in the order of their numbers, each with a link to its page."""
    rows, best = comparison.rows, comparison.best_jobs
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys][:MAX_COLUMNS]
    columns = [
        Column(key, label, tuple(row.parameters[key] for row in rows if key in row.parameters))
        for key, label in labels(keys).items()
    ]
    # What was evaluated on a split, beside the objective; the page of a job has all else.
    owners = {*SPLIT_NAMES, comparison.objective.partition("/")[0]}
    logged = dict.fromkeys(key for row in rows for key in row.metrics if key.partition("/")[0] in owners)
    metrics = [key for key in logged if key != comparison.objective][:MAX_METRICS]
    heads = [
        Head("job", is_number=all(row.job.isdecimal() for row in rows), sorted="ascending"),
        Head("status"),
        _objective_head(comparison.objective, comparison.mode, "at the best checkpoint, where one is kept"),
        *_parameter_heads(columns),
        *(Head(key, "the last value", is_number=True) for key in metrics),
        Head("time", is_number=True),
        Head("ticks", is_number=True),
    ]
    lines = []
    for row in rows:
        is_best = row.job in best
        lines.append((is_best, [
            Cell(row.job, row.job, href=_link(row)),
            Cell(row.status, row.status, status=row.status if row.status in SIGNS else "", is_state=True),
            _value(row.value if row.objective == comparison.objective else None, is_strong=is_best),
            *(_parameter(row.parameters.get(key)) for key in keys),
            *(_value(row.metrics.get(key)) for key in metrics),
            Cell(duration(row.seconds), row.seconds),
            Cell(number(row.num_ticks), row.num_ticks),
        ]))  # fmt: skip
    return _table(heads, lines)


def _link(row: SweepRow) -> str:
    # "./" and quoted: no name of a folder is a scheme, or leads elsewhere.
    return f"./{quote(row.job)}/{PAGE}" if (row.folder / PAGE).is_file() else ""


def _parameter(text: str | None) -> Cell:
    value = as_number(text)
    return Cell(shortened(shown(text), MAX_TEXT), text if value is None else value, title=text)


def _value(value: float | None, *, is_strong: bool = False) -> Cell:
    # NaN compares with nothing.
    sort = None if value is None or value != value else value
    return Cell(number(value), sort, None if value is None else repr(value), is_strong=is_strong)


# Columns of metrics in sweep.csv.
MAX_WRITTEN = 1_000
# A spreadsheet computes a text that begins so.
FORMULA_SIGNS = ("=", "+", "-", "@", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}",
                 "\N{FULLWIDTH HYPHEN-MINUS}", "\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip
Records = list[list[tuple[str, object]]]


def write_sweep_summary(sweep_dir: Path, comparison: Comparison | None = None) -> Path:
    """Write sweep.csv beside the jobs, and settings.csv where a setting has several of them.

    sweep.csv has a column for the job's name, one for each override, the objective's key and value (at the best
    checkpoint, where one is kept), one for the last value of each metric, and status, time_s, folder and error.
    settings.csv has a column for each hyperparameter, mean, standard_error, num_seeds, num_planned, is_best and jobs.
    With a second objective both say its key, its value and whether a job, or a setting, is on the Pareto front.

    Args:
        sweep_dir: the folder of a sweep.
        comparison: what `compare` has read from it, if it has.

    Returns:
        sweep.csv.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep.
        WriteError: the disk does not take them.
    """
    comparison = comparison or compare(sweep_dir)
    file = Path(sweep_dir) / "sweep.csv"
    _write(file, _job_records(comparison))
    if comparison.has_seeds:
        _write(file.with_name("settings.csv"), _setting_records(comparison))
    return file


def _job_records(comparison: Comparison) -> Records:
    """Return a row for each job: the head of each column, and what stands in it."""
    rows, second, on_front = comparison.rows, comparison.plan.second_objective, jobs_on_front(comparison)
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys, *comparison.constants]
    metrics = list(dict.fromkeys(key for row in rows for key in row.metrics))[:MAX_WRITTEN]
    records: Records = []
    for row in rows:
        two = [("second_objective", second), ("second_value", row.number(second)), ("on_front", row.job in on_front)]
        records.append([
            ("job", row.job), *((key, row.parameters.get(key)) for key in keys),
            ("objective", row.objective), ("value", row.value), *(two if second else ()),
            *((key, row.metrics.get(key)) for key in metrics), ("status", row.status), ("time_s", row.seconds),
            ("folder", _nearby(row.folder)), ("error", row.error),
        ])  # fmt: skip
    return records


def _setting_records(comparison: Comparison) -> Records:
    second, on_front = comparison.plan.second_objective, {id(point.setting) for point in pareto_front(comparison)}
    records: Records = []
    for setting in comparison.ordered:
        two = [("second_objective", second), ("second_mean", second_mean(comparison, setting.rows)),
               ("on_front", id(setting) in on_front)]  # fmt: skip
        records.append([
            *((column.key, setting.parameters.get(column.key)) for column in comparison.columns),
            ("objective", comparison.objective), ("mean", setting.mean), ("standard_error", setting.standard_error),
            *(two if second else ()), ("num_seeds", len(setting.values)), ("num_planned", setting.num_planned),
            ("is_best", setting is comparison.best), ("jobs", " ".join(row.job for row in setting.rows)),
        ])  # fmt: skip
    return records


def _write(file: Path, records: Records) -> None:
    # A column is found by its head: one that stands there already gets a number.
    heads: list[str] = []
    for head, _ in records[0] if records else ():
        names = (head if count == 1 else f"{head}_{count}" for count in range(1, len(heads) + 2))
        heads.append(next(name for name in names if name not in heads))
    with replacing(file.parent, file.name) as temporary, temporary.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(map(_cell, heads))
        writer.writerows([_cell(value) for _, value in record] for record in records)


def _cell(value: object) -> object:
    """Return a value on one line, so that no spreadsheet takes a text for a formula: `'` stands before such a one."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = escape(value).replace("\n", "\\n").replace("\t", "\\t")
    is_number = as_number(text) is not None or text.lstrip("+-") in ("inf", "nan")
    return f"'{text}" if text.lstrip().startswith(FORMULA_SIGNS) and not is_number else text


def _nearby(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
