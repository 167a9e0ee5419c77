"""The tables of a sweep's page: its settings and its jobs, sorted by a click."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from mlotool.report.formats import NONE, duration, number, shortened
from mlotool.report.markup import Markup, element
from mlotool.report.pareto import Point
from mlotool.report.series import SPLIT_NAMES
from mlotool.report.sweep import SweepRow
from mlotool.report.sweep_columns import as_number, labels, shown
from mlotool.report.sweep_settings import Comparison, Setting

MAX_METRICS = 8
MAX_COLUMNS = 40
MAX_FRONT = 100
MAX_TEXT = 60
SIGNS = {
    "finished": "✓", "pruned": "✂", "failed": "✕", "infeasible": "∅", "interrupted": "❙❙", "running": "●",
    "unfinished": "?",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        content: what it shows.
        sort: by what its column is sorted; None where the value is missing.
        class_: its CSS class.
        title: what it says when it is pointed at.
    """

    content: str
    sort: float | str | None = None
    class_: str | None = None
    title: str | None = None


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


def settings_table(comparison: Comparison) -> Markup:
    """All settings, the best first, those without a value last."""
    ordered = comparison.ordered
    is_by_number = {column.key: column.numbers is not None for column in comparison.columns}
    direction = "descending" if comparison.mode == "max" else "ascending"
    heads = [Head("rank", is_number=True, sorted="ascending")]
    heads += [
        Head(comparison.objective, "mean of the jobs that finished", is_number=True, first=direction),
        Head("± standard error", is_number=True),
        Head("seeds", "jobs that finished, of all", is_number=True),
    ]
    heads += [Head(column.label, column.key, is_by_number[column.key]) for column in comparison.columns[:MAX_COLUMNS]]
    heads.append(Head("jobs"))
    rows = [_setting_cells(comparison, each, rank) for rank, each in enumerate(ordered, 1)]
    return _table(heads, rows, [each is comparison.best for each in ordered])


def front_table(comparison: Comparison, front: Sequence[Point]) -> Markup:
    """The settings on the front of two objectives, the best by the first one first."""
    plan = comparison.plan
    directions = ["descending" if mode == "max" else "ascending" for mode in (comparison.mode, plan.second_mode)]
    columns = comparison.columns[:MAX_COLUMNS]
    heads = [
        Head("jobs"),
        Head(comparison.objective, is_number=True, first=directions[0]),
        Head(plan.second_objective, is_number=True, first=directions[1]),
        *(Head(column.label, column.key, column.numbers is not None) for column in columns),
    ]
    rows = [
        [
            Cell(each.setting.jobs, each.setting.jobs),
            _value(each.first),
            _value(each.second),
            *(_parameter(each.setting.parameters.get(column.key)) for column in columns),
        ]
        for each in front[:MAX_FRONT]
    ]
    return _table(heads, rows, [each.setting is comparison.best for each in front[:MAX_FRONT]])


def _setting_cells(comparison: Comparison, setting: Setting, rank: int) -> list[Cell]:
    mean, error = setting.mean, setting.standard_error
    mark = "★ " if setting is comparison.best else ""
    done, planned = len(setting.values), setting.num_planned
    return [
        Cell(f"{mark}{rank}" if setting.values else NONE, rank),
        _value(mean, is_strong=setting is comparison.best),
        _value(error),
        Cell(f"{done} of {planned}", done, None if done == planned else "interrupted"),
        *(_parameter(setting.parameters.get(column.key)) for column in comparison.columns[:MAX_COLUMNS]),
        Cell(setting.jobs, setting.jobs),
    ]


def jobs_table(comparison: Comparison) -> Markup:
    """All jobs in the order of their numbers, each with a link to its page."""
    rows = comparison.rows
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys][:MAX_COLUMNS]
    metrics = _metrics(rows, comparison.objective)
    shortest = labels(keys)
    direction = "descending" if comparison.mode == "max" else "ascending"
    heads = [Head("job", is_number=all(row.job.isdecimal() for row in rows), sorted="ascending"), Head("status")]
    heads.append(
        Head(comparison.objective, "at the best checkpoint, where one is kept", is_number=True, first=direction)
    )
    heads += [Head(shortest[key], key, _is_numeric(row.parameters.get(key) for row in rows)) for key in keys]
    heads += [Head(key, "the last value", is_number=True) for key in metrics]
    heads += [Head("time", is_number=True), Head("ticks", is_number=True)]
    marked = _best_jobs(comparison)
    lines = []
    for row in rows:
        value = row.value if row.objective == comparison.objective else None
        lines.append(
            [
                Cell(_link(row), row.job),
                status_cell(row),
                _value(value, is_strong=row.job in marked),
                *(_parameter(row.parameters.get(key)) for key in keys),
                *(_value(row.metrics.get(key)) for key in metrics),
                Cell(duration(row.seconds), row.seconds),
                Cell(number(row.num_ticks), row.num_ticks),
            ]
        )
    return _table(heads, lines, [row.job in marked for row in rows])


def status_cell(row: SweepRow) -> Cell:
    """A job's state, with a sign, and in its colour."""
    sign = SIGNS.get(row.status)
    mark = [element("span", sign, aria_hidden="true"), " "] if sign else []
    return Cell(element("span", *mark, row.status, class_="state"), row.status, row.status if sign else None)


def _best_jobs(comparison: Comparison) -> set[str]:
    return set() if comparison.best is None else {row.job for row in comparison.best.rows}


def _metrics(rows: Sequence[SweepRow], objective: str) -> list[str]:
    """Return what was evaluated on a split, beside the objective; the page of a job has all else."""
    owners = {*SPLIT_NAMES, objective.partition("/")[0]}
    keys = dict.fromkeys(key for row in rows for key in row.metrics if key.partition("/")[0] in owners)
    return [key for key in keys if key != objective][:MAX_METRICS]


def _link(row: SweepRow) -> str:
    # "./" and quoted: no name of a folder is a scheme, or leads elsewhere.
    href = f"./{quote(row.job)}/report.html"
    return element("a", row.job, href=href) if (row.folder / "report.html").is_file() else row.job


def _is_numeric(texts: Iterable[str | None]) -> bool:
    return all(as_number(text) is not None for text in texts if text is not None)


def _parameter(text: str | None) -> Cell:
    value = as_number(text)
    return Cell(shortened(shown(text), MAX_TEXT), text if value is None else value, title=text)


def _value(value: float | None, *, is_strong: bool = False) -> Cell:
    text = number(value)
    # NaN compares with nothing.
    sort = None if value is None or value != value else value
    content = element("b", text) if is_strong else text
    return Cell(content, sort, title=None if value is None else repr(value))


def _table(heads: Sequence[Head], rows: Sequence[Sequence[Cell]], is_best: Sequence[bool]) -> Markup:
    # The first column names the row.
    right = {place for place, head in enumerate(heads) if head.is_number and place}
    top = [
        element(
            "th",
            element("button", *_breakable(head.label), type="button"),
            scope="col",
            title=head.title,
            class_="value" if place in right else None,
            data_kind="number" if head.is_number else None,
            data_first=head.first if head.first != "ascending" else None,
            aria_sort=head.sorted,
        )
        for place, head in enumerate(heads)
    ]
    body = [
        element(
            "tr",
            *(_cell(cell, is_right=place in right) for place, cell in enumerate(row)),
            class_="best" if best else None,
        )
        for row, best in zip(rows, is_best, strict=True)
    ]
    table = element("table", element("thead", element("tr", *top)), element("tbody", *body), class_="sortable")
    return element("div", table, class_="card scroll")


def _breakable(label: str) -> list[str]:
    """Return a label that may go on in another line after a dot, a slash or an underscore."""
    pieces = re.split(r"(?<=[._/])", label)
    return [part for piece in pieces for part in (piece, element("wbr"))][:-1]


def _cell(cell: Cell, *, is_right: bool) -> Markup:
    class_ = " ".join(filter(None, ("value" if is_right else "", cell.class_)))
    return element("td", cell.content, class_=class_ or None, title=cell.title, data_sort=cell.sort)
