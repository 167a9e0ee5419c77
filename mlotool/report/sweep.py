"""A sweep as its folder tells it: what was asked for, and one row a job."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.files import is_held
from mlotool.core.run_files import located, read_json, read_text
from mlotool.report.formats import shortened
from mlotool.report.run_folder import as_dict, is_run_folder

# No run writes longer texts.
MAX_ERROR, MAX_NAME, MAX_STATUS, MAX_PROBLEMS = 5_000, 200, 40, 100
INFEASIBLE = "infeasible"
"""The status of a job whose decisions make no model: it was not trained, and is no failure."""

ENDED = ("finished", "pruned", "failed", INFEASIBLE)


@dataclass(frozen=True)
class SweepRow:
    """One job of a sweep.

    Args:
        job: the name of its folder.
        parameters: its overrides, each value as it was written.
        status: finished, pruned, failed, infeasible, interrupted, running, or unfinished where it left no summary and
            no process holds its folder.
        objective: the key; empty where it is not known.
        value: of the objective at the best checkpoint, else the last one; None where there is none.
        metrics: the last value of each key.
        seconds: from its start to its end; None where it has not ended.
        num_ticks: that it has done; None where it left no summary.
        folder: of the job.
        error: why it failed, or makes no model; empty where neither is so.
        num_parameters: of its problems.
    """

    job: str
    parameters: Mapping[str, str]
    status: str
    objective: str
    value: float | None
    metrics: Mapping[str, float]
    seconds: float | None
    num_ticks: int | None
    folder: Path
    error: str = ""
    num_parameters: Mapping[str, int] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """Return the last value of a metric, or of `<problem>/num_parameters`; None without one."""
        problem, _, name = key.rpartition("/")
        return self.num_parameters.get(problem) if name == "num_parameters" else self.metrics.get(key)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep was asked for, as plan.json in its folder has it.

    Args:
        objective: the key; empty where it is not known.
        mode: "min" or "max"; empty where it is not known.
        num_jobs: how many it is to have; None where that is not known.
        num_values: how many values the sweep lists for a key; a key that is drawn from a range has none.
        log_keys: those that were drawn by their logarithm.
        repeats: jobs of a trial, with a seed each.
        second_objective: the key of a second objective; empty where there is none.
        second_mode: "min" or "max" for it.
        sampler: that draws the trials; empty in a grid.
        num_random: trials that it draws at random before it looks at results; 0 where that is not known.
        num_same: draws of points that a job has, which have none of their own.
        ending: why there are fewer jobs than were asked for; empty where there are not.
    """

    objective: str = ""
    mode: str = ""
    num_jobs: int | None = None
    num_values: Mapping[str, int] = field(default_factory=dict)
    log_keys: frozenset[str] = frozenset()
    repeats: int = 1
    second_objective: str = ""
    second_mode: str = ""
    sampler: str = ""
    num_random: int = 0
    num_same: int = 0
    ending: str = ""


PLAN_FILE = "plan.json"


def sweep_rows(sweep_dir: Path) -> list[SweepRow]:
    """Return a row for every job of a sweep, failed ones included, in the order of their numbers.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep.
    """
    sweep_dir = Path(sweep_dir)
    jobs = [path for path in sweep_dir.iterdir() if _is_job(sweep_dir, path)] if sweep_dir.is_dir() else []
    if not jobs and not (sweep_dir / PLAN_FILE).is_file():
        found = "a folder without jobs" if sweep_dir.is_dir() else "no such folder"
        raise ConfigError(
            f"'{sweep_dir}' is not the folder of a sweep: found {found}; expected one folder a job (0, 1, ...) "
            "with summary.json or overrides.txt in it. Give the folder outputs/<name>/multirun/<date>_<time>."
        )
    is_alive = is_held(sweep_dir / ".lock")
    return [_row(path, is_alive=is_alive) for path in sorted(jobs, key=_natural)]


def read_plan(sweep_dir: Path) -> SweepPlan:
    """Return what a sweep was asked for, as far as its folder says."""
    found = _json(sweep_dir, PLAN_FILE)
    keys = {str(key): as_dict(value) for key, value in as_dict(found.get("keys")).items()}
    search = as_dict(found.get("search"))
    second, second_mode = (
        shortened(_text_of(search.get("second_objective")), MAX_NAME),
        _mode(search.get("second_mode")),
    )
    return SweepPlan(
        repeats=_whole(search.get("repeats")) or 1,
        second_objective=second if second_mode else "",
        second_mode=second_mode,
        sampler=shortened(_text_of(search.get("sampler")), MAX_STATUS),
        num_random=_whole(search.get("num_random")) or 0,
        num_same=_whole(search.get("num_same")) or 0,
        ending=shortened(_text_of(search.get("ending")), MAX_ERROR),
        objective=_text_of(found.get("objective")),
        mode=_mode(found.get("mode")),
        num_jobs=_whole(found.get("num_jobs")),
        num_values={key: count for key, each in keys.items() if (count := _whole(each.get("num_values")))},
        log_keys=frozenset(key for key, each in keys.items() if each.get("is_log") is True),
    )


def _is_job(sweep_dir: Path, path: Path) -> bool:
    if not path.is_dir() or path.name.startswith("."):
        return False
    try:
        located(sweep_dir, path.name)
    except RunFileError:
        return False
    # A job that died while it started has nothing but the number that the sweep gave it.
    return is_run_folder(path) or (path / "overrides.txt").is_file() or path.name.isdigit()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _row(path: Path, *, is_alive: bool) -> SweepRow:
    summary = _json(path, "summary.json")
    objective = as_dict(summary.get("objective"))
    metrics = {str(key): _number(value) for key, value in as_dict(summary.get("metrics")).items()}
    return SweepRow(
        job=path.name,
        parameters=_parameters(path),
        status=_status(path, summary, is_alive=is_alive),
        objective=shortened(_text_of(objective.get("key")), MAX_NAME),
        value=_number(objective.get("value")),
        metrics={key: value for key, value in metrics.items() if value is not None},
        seconds=_seconds(path, summary),
        num_ticks=_whole(summary.get("num_ticks")),
        folder=path,
        error=shortened(_text_of(summary.get("error")), MAX_ERROR),
        num_parameters={str(key): count for key, value in _few(summary) if (count := _whole(value)) is not None},
    )


def _few(summary: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return list(as_dict(summary.get("num_parameters")).items())[:MAX_PROBLEMS]


def _status(path: Path, summary: Mapping[str, Any], *, is_alive: bool) -> str:
    status = shortened(str(summary.get("status") or "unfinished"), MAX_STATUS)
    if status in ENDED:
        return status
    # A job holds its folder; one of a sweep that lives has yet to take hold of it. An interrupted one may go on.
    return "running" if is_held(path) or (is_alive and not summary) else status


def _parameters(path: Path) -> dict[str, str]:
    """Return a job's overrides, without what it takes out; before it has written them, those that it was given."""
    lines: list[Any] = _text(path, "overrides.txt").splitlines()
    if not lines:
        words = _json(path, "job.json").get("words")
        lines = words if isinstance(words, list) else []
    pairs = (str(line).strip().lstrip("+").partition("=") for line in lines)
    found = {key.strip(): value.strip() for key, sign, value in pairs if sign and not key.startswith(("~", "hydra."))}
    removed = {str(line).strip()[1:] for line in lines if str(line).startswith("~")}
    return {key: value for key, value in found.items() if key not in removed}


def _seconds(path: Path, summary: Mapping[str, Any]) -> float | None:
    if not summary:
        return None
    duration = _number(_json(path, "provenance.json").get("duration_s"))
    return duration if duration is not None else _number(summary.get("training_s"))


def _text(folder: Path, name: str) -> str:
    try:
        return read_text(folder, name) or ""
    except RunFileError:
        return ""


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json(folder, name) or {}
    except RunFileError:
        return {}


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def _mode(value: object) -> str:
    return value if value in ("min", "max") and isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None
