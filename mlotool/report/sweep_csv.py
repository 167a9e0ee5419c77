"""sweep.csv, one row a job, and settings.csv, one row a setting, for spreadsheets and pandas."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlotool.core.messages import escape
from mlotool.core.run_files import replacing
from mlotool.report.search import jobs_on_front, pareto_front, second_mean
from mlotool.report.sweep import Comparison, compare

FILE = "sweep.csv"
SETTINGS_FILE = "settings.csv"
MAX_METRICS = 1_000
# A spreadsheet computes a text that begins so.
FORMULA_SIGNS = ("=", "+", "-", "@", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}",
                 "\N{FULLWIDTH HYPHEN-MINUS}", "\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip


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
    file = Path(sweep_dir) / FILE
    _write(file, *_jobs(comparison))
    if comparison.has_seeds:
        _write(file.with_name(SETTINGS_FILE), *_settings(comparison))
    return file


def _jobs(comparison: Comparison) -> tuple[list[str], list[list[object]]]:
    rows = comparison.rows
    keys = [*(column.key for column in comparison.columns), *comparison.seed_keys, *comparison.constants]
    metrics = list(dict.fromkeys(key for row in rows for key in row.metrics))[:MAX_METRICS]
    second, on_front = comparison.plan.second_objective, jobs_on_front(comparison)
    two = ["second_objective", "second_value", "on_front"] if second else []
    heads = ["job", *keys, "objective", "value", *two, *metrics, "status", "time_s", "folder", "error"]
    lines: list[list[object]] = [
        [
            row.job,
            *(row.parameters.get(key) for key in keys),
            row.objective,
            row.value,
            *((second, row.number(second), str(row.job in on_front).lower()) if second else ()),
            *(row.metrics.get(key) for key in metrics),
            row.status,
            row.seconds,
            _nearby(row.folder),
            row.error,
        ]
        for row in rows
    ]
    return heads, lines


def _settings(comparison: Comparison) -> tuple[list[str], list[list[object]]]:
    keys = [column.key for column in comparison.columns]
    second, on_front = comparison.plan.second_objective, {id(each.setting) for each in pareto_front(comparison)}
    two = ["second_objective", "second_mean", "on_front"] if second else []
    heads = [*keys, "objective", "mean", "standard_error", *two, "num_seeds", "num_planned", "is_best", "jobs"]
    lines: list[list[object]] = [
        [
            *(each.parameters.get(key) for key in keys),
            comparison.objective,
            each.mean,
            each.standard_error,
            *((second, second_mean(comparison, each.rows), str(id(each) in on_front).lower()) if second else ()),
            len(each.values),
            each.num_planned,
            str(each is comparison.best).lower(),
            " ".join(row.job for row in each.rows),
        ]
        for each in comparison.ordered
    ]
    return heads, lines


def _write(file: Path, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with replacing(file.parent, file.name) as temporary, temporary.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([_cell(each) for each in _different(heads)])
        writer.writerows([_cell(value) for value in row] for row in rows)


def _different(heads: Sequence[str]) -> list[str]:
    """Return the heads, those that stand there already with a number behind: a column is found by its head."""
    found: dict[str, None] = {}
    for head in heads:
        name, count = head, 2
        while name in found:
            name, count = f"{head}_{count}", count + 1
        found[name] = None
    return list(found)


def _cell(value: object) -> object:
    """Return a value on one line, so that no spreadsheet takes a text for a formula: `'` stands before such a one."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = escape(value).replace("\n", "\\n").replace("\t", "\\t")
    return f"'{text}" if text.lstrip().startswith(FORMULA_SIGNS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _nearby(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
