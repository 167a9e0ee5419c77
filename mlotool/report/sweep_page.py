"""One self-contained page of a sweep: sweep.html, and its figures as PNG files beside it."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mlotool.report.figure import Sketchbook, report_style
from mlotool.report.formats import NONE, number
from mlotool.report.markup import Markup, element
from mlotool.report.run_folder import as_dict
from mlotool.report.sections import BADGES
from mlotool.report.sweep import SweepRow, sweep_rows
from mlotool.report.sweep_columns import Column, differing_columns
from mlotool.report.sweep_figures import Jobs, sweep_cards
from mlotool.report.write import grid, page, section

FILE = "sweep.html"


def write_sweep_page(sweep_dir: Path) -> Path:
    """Write sweep.html and report/*.png from the folders of a sweep's jobs.

    Args:
        sweep_dir: the folder of a sweep, also of one that is still running.

    Returns:
        the page.

    Raises:
        ConfigError: `sweep_dir` holds no jobs.
    """
    sweep_dir = Path(sweep_dir)
    rows = sweep_rows(sweep_dir)
    columns = differing_columns(rows)
    jobs = _jobs(rows, columns, _mode(rows))
    name = f"{_name(sweep_dir)}: sweep"
    parts = [_header(name, rows, jobs)]
    with report_style():
        wide, narrow = sweep_cards(Sketchbook(sweep_dir / "report"), jobs)
    if wide:
        parts.append(section("Hyperparameters", grid(wide)))
    if narrow:
        parts.append(section("Objective", grid(narrow)))
    parts.append(section("Jobs", _table(rows, columns, jobs)))
    parts += _errors(rows)
    file = sweep_dir / FILE
    file.write_text(page(name, parts), encoding="utf-8", errors="xmlcharrefreplace")
    return file


def _jobs(rows: Sequence[SweepRow], columns: Sequence[Column], mode: str) -> Jobs:
    objective = next((row.objective for row in rows if row.objective), "objective")
    used = [index for index, row in enumerate(rows) if row.value is not None and row.objective == objective]
    return Jobs(
        names=tuple(rows[index].job for index in used),
        values=tuple(rows[index].value or 0.0 for index in used),
        is_finished=tuple(rows[index].status == "finished" for index in used),
        columns=tuple(column.take(used) for column in columns),
        objective=objective,
        mode=mode,
    )


def _mode(rows: Sequence[SweepRow]) -> str:
    for row in rows:
        if row.value is not None:
            summary = as_dict(json.loads((row.folder / "summary.json").read_text(encoding="utf-8", errors="replace")))
            return "min" if as_dict(summary.get("objective")).get("mode") == "min" else "max"
    return "max"


def _name(sweep_dir: Path) -> str:
    # outputs/<name>/multirun/<date>_<time>
    path = sweep_dir.resolve()
    return path.parent.parent.name if path.parent.name == "multirun" else path.name


def _header(name: str, rows: Sequence[SweepRow], jobs: Jobs) -> Markup:
    failed = sum(row.status == "failed" for row in rows)
    status = (
        "failed" if failed else "finished" if all(row.status in ("finished", "pruned") for row in rows) else "unknown"
    )
    text = f"{failed} of {len(rows)} failed" if failed else "finished" if status == "finished" else "not finished"
    sign = element("span", BADGES[status][0], aria_hidden="true")
    head = element("div", element("h1", name), element("span", sign, text, class_=f"badge {status}"), class_="head")
    best = jobs.best
    counts = Counter(row.status for row in rows)
    direction = "smaller is better" if jobs.mode == "min" else "larger is better"
    tiles = [
        _tile(
            f"best of {len(rows)} jobs, {jobs.objective}",
            number(None if best is None else jobs.values[best]),
            direction,
            "tile first",
        ),
        _tile("best job", NONE if best is None else jobs.names[best], ""),
        *(_tile(status, str(count), "jobs" if count > 1 else "job") for status, count in counts.items()),
    ]
    parts = [head, element("dl", *tiles, class_="tiles")]
    if best is not None and jobs.columns:
        lines = "\n".join(
            f"{column.key}={column.texts[best]}" for column in jobs.columns if column.texts[best] is not None
        )
        parts.append(element("p", "The best job's own overrides; one click selects them.", class_="muted"))
        parts.append(element("pre", lines, class_="command"))
    return element("header", *parts)


def _tile(label: str, value: str, below: str, class_: str = "tile") -> Markup:
    small = [element("small", below)] if below else []
    return element("div", element("dt", label), element("dd", value, *small), class_=class_)


def _table(rows: Sequence[SweepRow], columns: Sequence[Column], jobs: Jobs) -> Markup:
    best = None if jobs.best is None else jobs.names[jobs.best]
    heads = [element("th", "job", scope="col")]
    heads += [element("th", column.label, scope="col", title=column.key) for column in columns]
    heads += [element("th", jobs.objective, scope="col", class_="number"), element("th", "status", scope="col")]
    lines = []
    for index, row in enumerate(rows):
        value = element("b", number(row.value), " ★") if row.job == best else number(row.value)
        cells = [element("th", row.job, scope="row"), *(element("td", _cell(column, index)) for column in columns)]
        cells.append(element("td", value, class_="number", title=None if row.value is None else repr(row.value)))
        cells.append(element("td", row.status, class_=row.status if row.status in (*BADGES, "unfinished") else None))
        lines.append(element("tr", *cells))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *lines))
    return element("div", table, class_="card scroll")


def _cell(column: Column, index: int) -> str:
    text = column.texts[index]
    if text is None:
        return NONE
    return number(column.numbers[index]) if column.numbers is not None else text


def _errors(rows: Sequence[SweepRow]) -> list[Markup]:
    failed = [row for row in rows if row.error]
    if not failed:
        return []
    cards = [
        element("div", element("h3", f"Job {row.job}"), element("pre", row.error, class_="wrap"), class_="card error")
        for row in failed
    ]
    return [section("Why jobs failed", *cards)]
