"""A search over the settings of a sweep: its trials, the front of two objectives, and draws that make no model."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.run_files import read_json
from mlotool.report.formats import LARGEST, number
from mlotool.report.run_folder import as_dict
from mlotool.report.sweep import DECISION, INFEASIBLE, Comparison, Setting, SweepRow, better, compare, override

FILE = "sweep.json"
# Folders beside a sweep's that are looked at, the newest ones.
MAX_SWEEPS = 200

RANDOM = "random"


@dataclass(frozen=True)
class Trial:
    """A point of a search.

    Args:
        name: of its first job.
        status: finished where it counts, else that of its jobs.
        value: of the objective; None where there is none.
    """

    name: str
    status: str
    value: float | None


@dataclass(frozen=True)
class Baseline:
    """The best so far of another search.

    Args:
        name: of its folder.
        best: after each of its trials; NaN before the first value.
    """

    name: str
    best: NDArray[np.float64]


def trials(comparison: Comparison) -> list[Trial]:
    """Return the trials of a search, in their order."""
    repeats, rows = comparison.plan.repeats, comparison.rows
    groups: dict[object, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(int(row.job) // repeats if row.job.isdecimal() else row.job, []).append(row)
    found = []
    for group in groups.values():
        known = [row.value for row in group if row.value is not None and row.objective == comparison.objective]
        others = [row.status for row in group if row.status != "finished"]
        status = others[0] if others else "finished" if len(known) >= repeats else "unfinished"
        found.append(Trial(group[0].job, status, float(np.mean(known)) if known else None))
    return found


def best_so_far(trials: Sequence[Trial], mode: str) -> NDArray[np.float64]:
    """Return the best value of the trials that finished, after each trial; NaN before the first."""
    values = [np.nan if one.value is None or one.status != "finished" else one.value for one in trials]
    best = np.fmin if mode == "min" else np.fmax
    return np.asarray(best.accumulate(np.array(values, dtype=np.float64)))


def random_baseline(comparison: Comparison) -> Baseline | None:
    """Return the newest finished random search of the same recipe and settings beside a sweep; None without one."""
    sampler, searched = _searched(comparison.folder)
    if not searched or sampler == RANDOM:
        return None
    folder = comparison.folder.resolve()
    for path in sorted(file.parent for file in folder.parent.glob(f"*/{FILE}"))[::-1][:MAX_SWEEPS]:
        # No link: it may lead to a sweep of another place.
        if path.is_symlink() or path == folder or _searched(path) != (RANDOM, searched):
            continue
        try:
            other = compare(path)
        except (ConfigError, OSError):
            continue
        is_over = other.rows and other.num_jobs == other.num_ended
        best = best_so_far(trials(other), other.mode)
        is_alike = (other.objective, other.mode) == (comparison.objective, comparison.mode)
        if is_over and is_alike and not np.isnan(best).all():
            return Baseline(path.name, best)
    return None


def _searched(folder: Path) -> tuple[str, str]:
    """Return the sampler of a search, and over which recipe and what it searches; empty where it does not say."""
    try:
        identity = as_dict((read_json(folder, FILE) or {}).get("identity"))
    except RunFileError:
        return "", ""
    fixed = identity.get("fixed")
    words = [str(word) for word in fixed] if isinstance(fixed, list) else []
    kept = [word for word in words if not word.lstrip("+").startswith(("sweep=", "sweep.", "sweep@"))]
    what = json.dumps([kept, identity.get("dimensions"), identity.get("repeats")]) if identity else ""
    return str(identity.get("sampler")), what


# Settings on the front that have a line each; of more the best ones by the first objective.
MAX_LINES = 10


@dataclass(frozen=True)
class Point:
    """A setting with a value of both objectives, each the mean of its jobs."""

    setting: Setting
    first: float
    second: float


def points(comparison: Comparison) -> list[Point]:
    """Return the settings that have both; none where there is one objective."""
    if not comparison.plan.second_objective or not comparison.mode:
        return []
    found = []
    for setting in comparison.settings:
        known = _seconds(comparison, [row for row in setting.rows if row.status == "finished"])
        if setting.mean is not None and setting.is_complete and known and len(known) >= len(setting.values):
            found.append(Point(setting, setting.mean, float(np.mean(known))))
    return found


def second_mean(comparison: Comparison, rows: Sequence[SweepRow]) -> float | None:
    """Return the mean of the second objective of jobs; None where none has it."""
    known = _seconds(comparison, rows)
    return float(np.mean(known)) if known else None


def _seconds(comparison: Comparison, rows: Sequence[SweepRow]) -> list[float]:
    values = [row.number(comparison.plan.second_objective) for row in rows]
    return [value for value in values if value is not None and abs(value) < LARGEST]


def front(points: list[Point], mode: str, second_mode: str) -> list[Point]:
    """Return the points of which none is better in one objective and as good in the other, by the first one.

    Example:
        >>> setting = Setting({}, (), (), 1)
        >>> some = [Point(setting, *values) for values in ((0.9, 5.0), (0.8, 1.0), (0.8, 2.0), (0.7, 1.0))]
        >>> [(point.first, point.second) for point in front(some, "max", "min")]
        [(0.9, 5.0), (0.8, 1.0)]
    """
    one, two = (1 if direction == "min" else -1 for direction in (mode, second_mode))
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (one * point.first, two * point.second)):
        is_equal = bool(kept) and (point.first, point.second) == (kept[-1].first, kept[-1].second)
        if not kept or two * point.second < two * kept[-1].second or is_equal:
            kept.append(point)
    return kept


def pareto_front(comparison: Comparison) -> list[Point]:
    """Return the front of a sweep's settings."""
    return front(points(comparison), comparison.mode, comparison.plan.second_mode)


def jobs_on_front(comparison: Comparison) -> frozenset[str]:
    """Return the names of the jobs of the settings on the front."""
    return frozenset(row.job for point in pareto_front(comparison) for row in point.setting.rows)


def front_lines(comparison: Comparison) -> list[str]:
    """Return what a search of two objectives has found, in lines; none where there is one objective."""
    best = pareto_front(comparison)
    if not best:
        return []
    plan, many = comparison.plan, "settings" if comparison.has_seeds else "jobs"
    one = f"{comparison.objective} ({better(comparison.mode)})"
    two = f"{plan.second_objective} ({better(plan.second_mode)})"
    lines = [f"Pareto front of {one} and {two}: {len(best)} of {len(points(comparison))} {many}"]
    for point in best[:MAX_LINES]:
        jobs = f"job{'s' if len(point.setting.rows) > 1 else ''} {point.setting.jobs}"
        values = f"{comparison.objective} {number(point.first)}, {plan.second_objective} {number(point.second)}"
        lines.append(f"  {jobs}: {values}: {comparison.describe(point.setting)}")
    more = [f"  {len(best) - MAX_LINES} more: on_front in sweep.csv"] if len(best) > MAX_LINES else []
    return [*lines, *more]


MAX_REASONS, MAX_SHARED = 3, 3
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Reason:
    """Why some draws make no model.

    Args:
        text: as the first of them says it; others may have other numbers in it.
        rows: the draws.
        shared: decisions that all of them have, and no draw that makes a model.
    """

    text: str
    rows: tuple[SweepRow, ...]
    shared: tuple[str, ...]

    def __str__(self) -> str:
        shared = f" (each has {', '.join(self.shared)})" if self.shared and len(self.rows) > 1 else ""
        return f"job {self.rows[0].job}{shared}: {self.text}"


def reasons(rows: Sequence[SweepRow]) -> list[Reason]:
    """Return the reasons of draws that make no model, the commonest first.

    Args:
        rows: all jobs of a search.
    """
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        if row.status == INFEASIBLE:
            groups.setdefault(_NUMBER.sub("#", row.error), []).append(row)
    fitting = set().union(*(_decisions(row) for row in rows if row.status != INFEASIBLE))
    found = []
    for group in groups.values():
        shared = sorted(set.intersection(*map(_decisions, group)) - fitting)[:MAX_SHARED]
        found.append(Reason(group[0].error, tuple(group), tuple(f"{key}={value}" for key, value in shared)))
    return sorted(found, key=lambda reason: -len(reason.rows))


def infeasible_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Return what is to be said of draws that make no model; nothing where there are none."""
    found = reasons(rows)
    num = sum(len(reason.rows) for reason in found)
    few = f"{num} draw{'s make' if num > 1 else ' makes'} no model (infeasible), untrained"
    if len(found) < 2:
        return [f"{few}: {reason}" for reason in found]
    lines = [f"  {len(reason.rows)} of {num}: {reason}" for reason in found[:MAX_REASONS]]
    left = len(found) - MAX_REASONS
    return [f"{few}, for {len(found)} reasons:", *lines, *([f"  {left} more: see sweep.csv"] if left > 0 else [])]


def nothing_fits(rows: Sequence[SweepRow]) -> str:
    """Return why a search has trained nothing at all; empty where a draw makes a model."""
    found = reasons(rows)
    if not found or any(row.status != INFEASIBLE for row in rows):
        return ""
    first, num = found[0], len(rows)
    example = " ".join(sorted(override(*decision) for decision in _decisions(first.rows[0])))
    return (
        f"decisions: found no model in all of {num} draw{'s' if num > 1 else ''}, {len(first.rows)} of them for one "
        f"reason: {first} Expected draws that make one; job {first.rows[0].job} has {example or 'no decisions'}. "
        "Correct the candidate; `mlotool show RECIPE --nodes PROBLEM` says what stands where."
    )


def _decisions(row: SweepRow) -> set[tuple[str, str]]:
    return {(key, value) for key, value in row.parameters.items() if key.startswith(DECISION)}
