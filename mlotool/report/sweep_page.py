"""What is written of a sweep: the columns of its tables, sweep.csv, settings.csv, and its page with the figures."""

import csv
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml
from markupsafe import Markup

from mlotool.core.messages import escape
from mlotool.folders.run_folder import ENDED, INFEASIBLE, RunFolder
from mlotool.folders.safe_files import replacing, write_text
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report import search
from mlotool.report import sweep as sweeps
from mlotool.report.figure import Sketchbook, report_style
from mlotool.report.formats import NONE, duration, number, shortened
from mlotool.report.graph import model_section
from mlotool.report.models import read_models
from mlotool.report.page import page
from mlotool.report.recorded_run import SPLIT_NAMES
from mlotool.report.sweep import Comparison, Setting, SweepRow, compare, shown
from mlotool.report.sweep_figures import sweep_cards

MAX_ERRORS, MAX_METRICS, MAX_COLUMNS, MAX_FRONT, MAX_TEXT = 50, 8, 40, 100, 60
# Overrides that stand in lines of their own; more of them are written one behind the other.
MAX_LINES = 10
# Columns of metrics in sweep.csv.
MAX_WRITTEN = 1_000
# A spreadsheet computes a text that begins so.
FORMULA_SIGNS = ("=", "+", "-", "@", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}",
                 "\N{FULLWIDTH HYPHEN-MINUS}", "\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip


class View(Flag):
    """Where a column is shown: in the CSV file, on the page, in the terminal."""

    FILE = auto()
    PAGE = auto()
    TERMINAL = auto()
    READER = PAGE | TERMINAL
    ALL = FILE | READER


class TableCell(NamedTuple):
    """A cell of the page: its text, by what it is sorted, the whole value, a CSS class, and where it leads to."""

    text: str
    sort: float | str | None
    title: str
    status: str
    href: str


@dataclass(frozen=True)
class TableColumn:
    """A column of a table of jobs or of settings.

    Args:
        key: its head in the CSV file.
        values: a row each.
        views: where it is shown.
        label: its head for a reader; the key where there is none.
        show: makes a text of a value.
        title: what the head says when it is pointed at.
        is_needed: whether a narrow terminal shows it whole.
        is_max: whether larger values come first when it is sorted.
        links: where the cells lead to.
    """

    key: str
    values: Sequence[Any]
    views: View = View.ALL
    label: str = ""
    show: Callable[[Any], str] = number
    title: str = ""
    is_needed: bool = False
    is_max: bool = False
    links: Sequence[str] = ()

    @property
    def head(self) -> str:
        """The head for a reader."""
        return self.label or self.key

    @property
    def pieces(self) -> list[str]:
        """The head, cut where it may go on in another line: after a dot, a slash or an underscore."""
        return re.split(r"(?<=[._/])(?=.)", self.head)

    @cached_property
    def is_number(self) -> bool:
        """Whether its column is sorted by size."""
        known = (value for value in self.values if value is not None and value == value)
        return all(sweeps.as_number(str(value)) is not None for value in known)

    @property
    def cells(self) -> list[TableCell]:
        """The cells of the page."""
        links = self.links or [""] * len(self.values)
        return [self._cell(value, link) for value, link in zip(self.values, links, strict=True)]

    def _cell(self, value: Any, link: str) -> TableCell:
        text = shortened(self.show(value), MAX_TEXT)
        # NaN compares with nothing.
        is_known = value is not None and value == value
        sort = (sweeps.as_number(str(value)) if self.is_number else str(value)) if is_known else None
        title = "" if value is None or str(value) == text else str(value)
        return TableCell(text, sort, title, text if self.key == "status" else "", link)


def job_columns(comparison: Comparison, rows: Sequence[SweepRow]) -> list[TableColumn]:
    """Return the columns of a table with a row for each of some jobs."""
    objective, second = comparison.objective, comparison.plan.second_objective
    on_front = search.jobs_on_front(comparison)
    marks = []
    for row in rows:
        is_empty = row.status == "finished" and bool(row.objective) and row.value is None
        kinds = {"best": row.job in comparison.best_jobs, "front": row.job in on_front, "no value": is_empty}
        marks.append(", ".join([row.status, *(kind for kind, is_so in kinds.items() if is_so)]))
    page = RunFolder.PAGE
    links = [f"./{quote(row.job)}/{page}" if (row.folder / page).is_file() else "" for row in rows]
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys]
    columns = [TableColumn("job", [row.job for row in rows], is_needed=True, links=links)]
    for place, (key, label) in enumerate(sweeps.labels(keys).items()):
        views = View.ALL if place < MAX_COLUMNS else View.FILE
        columns.append(TableColumn(key, [row.parameters.get(key) for row in rows], views, label, shown, key))
    columns += [TableColumn(key, [row.parameters.get(key) for row in rows], View.FILE) for key in comparison.constants]
    values = [row.value if row.objective == objective else None for row in rows]
    columns += [
        TableColumn("objective", [row.objective for row in rows], View.FILE),
        TableColumn("value", [row.value for row in rows], View.FILE),
        TableColumn("value", values, View.READER, objective, number, "at the best checkpoint, where one is kept",
                    is_needed=True, is_max=comparison.mode == "max"),
    ]  # fmt: skip
    if second:
        columns += _second_columns(comparison, "second_value", [row.number(second) for row in rows])
        columns.append(TableColumn("on_front", [row.job in on_front for row in rows], View.FILE))
    # What was evaluated on a split, beside the objective; the page of a job has all else.
    owners = {*SPLIT_NAMES, objective.partition("/")[0]}
    metrics = list(dict.fromkeys(key for row in rows for key in row.metrics))[:MAX_WRITTEN]
    on_page = [key for key in metrics if key.partition("/")[0] in owners and key != objective][:MAX_METRICS]
    for key in metrics:
        views = View.FILE | View.PAGE if key in on_page else View.FILE
        columns.append(TableColumn(key, [row.metrics.get(key) for row in rows], views, title="the last value"))
    return [
        *columns,
        *_lineage_column(comparison, rows),
        TableColumn("status", [row.status for row in rows], View.FILE | View.PAGE),
        TableColumn("status", marks, View.TERMINAL, is_needed=True),
        TableColumn("time_s", [row.seconds for row in rows], View.ALL, "time", duration),
        TableColumn("ticks", [row.num_ticks for row in rows], View.PAGE),
        TableColumn("folder", [_nearby(row.folder) for row in rows], View.FILE),
        TableColumn("error", [row.error for row in rows], View.FILE),
    ]


def _lineage_column(comparison: Comparison, rows: Sequence[SweepRow]) -> list[TableColumn]:
    """Return whom the members of a population have copied and after which tick; no column without one."""
    population = comparison.population
    if population is None:
        return []
    copies = [population.history(int(row.job)) if row.job.isdigit() else [] for row in rows]
    texts = [", ".join(f"{copy.source} at {copy.tick}" for copy in history) for history in copies]
    title = "jobs whose state it has copied, and after which tick; the settings are its initial ones"
    return [TableColumn("copied", texts, title=title, show=str)]


def setting_columns(comparison: Comparison, settings: Sequence[Setting]) -> list[TableColumn]:
    """Return the columns of a table with a row for each of some settings."""
    ordered, best, second = comparison.ordered, comparison.best, comparison.plan.second_objective
    ranks = [ordered.index(setting) + 1 if setting.values else None for setting in settings]
    columns = [TableColumn("rank", ranks, View.PAGE)]
    for place, column in enumerate(comparison.columns):
        texts = [setting.parameters.get(column.key) for setting in settings]
        views = View.ALL if place < MAX_COLUMNS else View.FILE
        columns.append(TableColumn(column.key, texts, views, column.label, shown, column.key))
    seeds = [f"{len(setting.values)} of {setting.num_planned}" for setting in settings]
    columns += [
        TableColumn("objective", [comparison.objective] * len(settings), View.FILE),
        TableColumn("mean", [setting.mean for setting in settings], View.ALL, f"{comparison.objective}, mean",
                    title="over the finished jobs", is_needed=True, is_max=comparison.mode == "max"),
        TableColumn("standard_error", [setting.standard_error for setting in settings], View.ALL, "± std. error",
                    lambda value: "" if value is None else f"{value:.2g}", is_needed=True),
    ]  # fmt: skip
    # The objective's metric on other splits, such as test, of the checkpoints whose objectives are averaged.
    for key in dict.fromkeys(key for setting in settings for key in setting.other_splits):
        values = [setting.other_splits.get(key, ()) for setting in settings]
        texts = [sweeps.mean_text(known) if known else "" for known in values]
        columns += [
            TableColumn(f"{key}_mean", [sweeps.mean_of(known) for known in values], View.FILE),
            TableColumn(f"{key}_standard_error", [sweeps.standard_error_of(known) for known in values], View.FILE),
            TableColumn(key, texts, View.READER, title="at the best checkpoint: mean ± standard error"),
        ]
    if second:
        columns += _second_columns(comparison, "second_mean", [setting.second for setting in settings])
        on_front = search.pareto_front(comparison)
        columns.append(TableColumn("on_front", [setting in on_front for setting in settings], View.FILE))
    return [
        *columns,
        TableColumn("num_seeds", [len(setting.values) for setting in settings], View.FILE),
        TableColumn("num_planned", [setting.num_planned for setting in settings], View.FILE),
        TableColumn("seeds", seeds, View.READER, title="finished jobs, of all jobs", is_needed=True),
        TableColumn("is_best", [setting is best for setting in settings], View.FILE),
        TableColumn("best", ["★" if setting is best else "" for setting in settings], View.READER, is_needed=True),
        TableColumn("jobs", [" ".join(row.job for row in setting.rows) for setting in settings], View.FILE),
        TableColumn("jobs", [setting.jobs for setting in settings], View.READER),
    ]


def _second_columns(comparison: Comparison, key: str, values: Sequence[float | None]) -> list[TableColumn]:
    name, is_max = comparison.plan.second_objective, comparison.plan.second_mode == "max"
    # The problem's name says no more where there is room for little.
    label = "num_parameters" if name.endswith("/num_parameters") else name
    return [
        TableColumn("second_objective", [name] * len(values), View.FILE),
        TableColumn(key, values, View.ALL, label, title=name, is_needed=True, is_max=is_max),
    ]


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
    book = Sketchbook(sweep_dir / SweepFolder.FIGURES)
    with report_style():
        parallel, cards = sweep_cards(book, comparison)
    rows, chosen = comparison.rows, comparison.best or comparison.only
    failed = [row for row in rows if row.error and row.status != INFEASIBLE]
    front = search.pareto_front(comparison)[:MAX_FRONT]
    settings = comparison.ordered if comparison.has_seeds and len(comparison.settings) > 1 else []
    best_jobs, best_settings = comparison.best_jobs, {comparison.best.jobs} if comparison.best else set()
    text = page(
        "sweep.html", f"{comparison.name}: sweep", "sort_table.js", comparison=comparison, state=_state(comparison),
        tiles=_tiles(comparison), max_lines=MAX_LINES, parallel=parallel, cards=cards, has_figures=bool(book.names),
        overrides=[] if chosen is None or chosen.mean is None else comparison.overrides(chosen),
        repeat=sweeps.repeat_command(comparison),
        front=_page_table(setting_columns(comparison, front), best_settings),
        settings=_page_table(setting_columns(comparison, settings), best_settings),
        jobs=_page_table(job_columns(comparison, rows), best_jobs), models=_models(chosen),
        command=_command(rows), failed=failed[:MAX_ERRORS], max_errors=MAX_ERRORS,
        infeasible=[row for row in rows if row.status == INFEASIBLE], together=sweeps.fusion_lines(sweep_dir),
    )  # fmt: skip
    return write_text(sweep_dir, SweepFolder.PAGE, text)


def _page_table(columns: Sequence[TableColumn], best: frozenset[str] | set[str]) -> dict[str, Any] | None:
    """Return the table of the page, in which the rows of the best jobs stand out; None without a row."""
    shown = [column for column in columns if View.PAGE in column.views]
    names = next(column.values for column in columns[::-1] if column.key in ("job", "jobs"))
    rows = [(name in best, cells) for name, *cells in zip(names, *(column.cells for column in shown), strict=True)]
    return {"columns": shown, "rows": rows} if rows else None


def _models(setting: Setting | None) -> list[Markup]:
    """Return the models of the best job, where it has some of a space."""
    finished = [] if setting is None else [row for row in setting.rows if row.status == "finished"]
    models = ([model_section(model) for model in read_models(RunFolder(row.folder))[0]] for row in finished)
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
        below = f"mean{error} of {sweeps.seeds(setting)}; {direction}" if comparison.has_seeds else direction
        value = sweeps.mean_text(setting.values)
    tiles: list[tuple[str, ...]] = [(label, value, below, "tile first")]
    if best is not None:
        tiles.append(("jobs of the best setting" if len(best.rows) > 1 else "best job", best.jobs))
    counts = Counter(row.status for row in comparison.rows)
    counts["not begun"] = comparison.num_jobs - len(comparison.rows)
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return [*tiles, ("jobs that have ended", f"{comparison.num_ended} of {comparison.num_jobs}", ended)]


def _command(rows: Sequence[SweepRow]) -> str:
    """Return what makes the page of the first job without one: jobs that share a process leave it to the reader."""
    ended = (row.folder for row in rows if row.status in ENDED and RunFolder(row.folder).has(RunFolder.CONFIG))
    first = next((folder for folder in ended if not RunFolder(folder).has(RunFolder.PAGE)), None)
    return "" if first is None else f"mlotool report {shlex.quote(_nearby(first))}"


def write_sweep_summary(sweep_dir: Path, comparison: Comparison | None = None) -> Path:
    """Write sweep.csv beside the jobs, and settings.csv where a setting has several of them.

    sweep.csv has a column for the job's name, one for each override, the objective's key and value (at the best
    checkpoint, where one is kept), one for the last value of each metric, and status, time_s, folder and error.
    settings.csv has a column for each hyperparameter, mean, standard_error, num_seeds, num_planned, is_best and jobs.
    best.yaml has the best jobs, and a command that trains them once more.
    With a second objective both tables say its key, its value and whether a job, or a setting, is on the Pareto front.

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
    file = Path(sweep_dir) / SweepFolder.TABLE
    _write(file, job_columns(comparison, comparison.rows))
    if comparison.has_seeds:
        _write(file.with_name(SweepFolder.SETTINGS), setting_columns(comparison, comparison.ordered))
    _write_best(comparison)
    return file


def _write_best(comparison: Comparison) -> None:
    """Write best.yaml: the best jobs, their value, and the line that trains them once more."""
    setting, command = comparison.best or comparison.only, sweeps.repeat_command(comparison)
    if setting is None or not command:
        return
    content = {
        "command": command,
        "jobs": [row.job for row in setting.rows],
        "objective": comparison.objective,
        "value": setting.mean,
        "overrides": comparison.overrides(setting),
    }
    SweepFolder(comparison.folder).write_text(SweepFolder.BEST, yaml.safe_dump(content, sort_keys=False, width=10**6))


def _write(file: Path, columns: Sequence[TableColumn]) -> None:
    written = [column for column in columns if View.FILE in column.views]
    # A column is found by its head: one that stands there already gets a number.
    heads: list[str] = []
    for column in written:
        names = (column.key if count == 1 else f"{column.key}_{count}" for count in range(1, len(heads) + 2))
        heads.append(next(name for name in names if name not in heads))
    with replacing(file.parent, file.name) as temporary, temporary.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(map(_csv_cell, heads))
        writer.writerows(map(_csv_cell, row) for row in zip(*(column.values for column in written), strict=True))


def _csv_cell(value: object) -> object:
    """Return a value on one line, so that no spreadsheet takes a text for a formula: `'` stands before such a one."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = escape(value).replace("\n", "\\n").replace("\t", "\\t")
    is_number = sweeps.as_number(text) is not None or text.lstrip("+-") in ("inf", "nan")
    return f"'{text}" if text.lstrip().startswith(FORMULA_SIGNS) and not is_number else text


def _nearby(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
