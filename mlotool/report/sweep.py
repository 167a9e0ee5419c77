"""The jobs of a sweep, one row each."""

import csv
import json
import re
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.report.run_folder import as_dict, is_run_folder


@dataclass(frozen=True)
class SweepRow:
    """One job of a sweep.

    Args:
        job: the name of its folder.
        overrides: of its command line, separated by spaces.
        status: finished, pruned, failed, interrupted, or unfinished where it left no summary.
        objective: the key; empty where it is not known.
        value: of the objective; None where there is none.
        folder: of the job.
        error: why it failed; empty where it did not.
    """

    job: str
    overrides: str
    status: str
    objective: str
    value: float | None
    folder: Path
    error: str = ""


def sweep_rows(sweep_dir: Path) -> list[SweepRow]:
    """Return a row for every job of a sweep, failed ones included, in the order of their numbers.

    Raises:
        ConfigError: `sweep_dir` holds no jobs.
    """
    sweep_dir = Path(sweep_dir)
    jobs = [path for path in sweep_dir.iterdir() if _is_job(path)] if sweep_dir.is_dir() else []
    if not jobs:
        found = "a folder without jobs" if sweep_dir.is_dir() else "no such folder"
        raise ConfigError(
            f"'{sweep_dir}' is not the folder of a sweep: found {found}; expected one folder a job (0, 1, ...) "
            "with summary.json or overrides.txt in it. Give the folder outputs/<name>/multirun/<date>_<time>."
        )
    return [_row(path) for path in sorted(jobs, key=_natural)]


def write_sweep_summary(sweep_dir: Path) -> Path:
    """Write sweep.csv beside the jobs, one row a job: job, overrides, status, objective, value, folder, error.

    Returns:
        the file.

    Raises:
        ConfigError: `sweep_dir` holds no jobs.
    """
    rows = sweep_rows(sweep_dir)
    file = Path(sweep_dir) / "sweep.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([field.name for field in fields(SweepRow)])
        writer.writerows([_cell(value) for value in astuple(row)] for row in rows)
    return file


def _cell(value: object) -> object:
    """Return a value as spreadsheets show it: they would compute a text that begins as a formula does."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else "" if value is None else value


def _is_job(path: Path) -> bool:
    if not path.is_dir() or path.name.startswith("."):
        return False
    # A job that died while it started has nothing but the number that the sweep gave it.
    return is_run_folder(path) or (path / "overrides.txt").is_file() or path.name.isdigit()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _row(path: Path) -> SweepRow:
    summary = _summary(path / "summary.json")
    objective = as_dict(summary.get("objective"))
    value = objective.get("value")
    overrides = path / "overrides.txt"
    lines = overrides.read_text(encoding="utf-8", errors="replace").splitlines() if overrides.is_file() else []
    return SweepRow(
        job=path.name,
        overrides=" ".join(line.strip() for line in lines if line.strip()),
        status=str(summary.get("status") or "unfinished"),
        objective=str(objective.get("key") or ""),
        value=float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None,
        folder=path,
        error=str(summary.get("error") or ""),
    )


def _summary(file: Path) -> dict[str, Any]:
    try:
        return as_dict(json.loads(file.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError):
        return {}
