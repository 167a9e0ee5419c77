"""A search over the settings of a sweep: its trials, the front of two objectives, and draws that make no model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.run_files import read_json
from mlotool.report.formats import LARGEST, number
from mlotool.report.run_folder import as_dict
from mlotool.report.sweep import DECISION, ENDED, INFEASIBLE, Comparison, Setting, SweepRow, compare, override

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
    groups: dict[object, list[Any]] = {}
    for place, row in enumerate(rows):
        number = int(row.job) // repeats if row.job.isdecimal() and len(row.job) < 10 else f"{place}"
        groups.setdefault(number, []).append(row)
    return [_trial(comparison, group, repeats) for group in groups.values()]


def _trial(comparison: Comparison, rows: Sequence[Any], repeats: int) -> Trial:
    known = [row.value for row in rows if row.value is not None and row.objective == comparison.objective]
    others = [row.status for row in rows if row.status != "finished"]
    status = others[0] if others else "finished" if len(known) >= repeats else "unfinished"
    return Trial(rows[0].job, status, float(np.mean(known)) if known else None)


def best_so_far(found: Sequence[Trial], mode: str) -> NDArray[np.float64]:
    """Return the best value of the trials that finished, after each trial; NaN before the first."""
    values = [np.nan if each.value is None or each.status != "finished" else each.value for each in found]
    best = np.fmin if mode == "min" else np.fmax
    return np.asarray(best.accumulate(np.array(values, dtype=np.float64)))


def random_baseline(comparison: Comparison) -> Baseline | None:
    """Return the newest finished random search of the same recipe and settings beside a sweep; None without one."""
    own = _identity(comparison.folder)
    if own is None or own.get("sampler") == RANDOM:
        return None
    folder = comparison.folder.resolve()
    beside = sorted((file.parent for file in folder.parent.glob(f"*/{FILE}")), key=lambda path: path.name)
    for path in beside[::-1][:MAX_SWEEPS]:
        # No link: it may lead to a sweep of another place.
        if path.is_symlink() or path == folder:
            continue
        identity = _identity(path)
        if identity is not None and identity.get("sampler") == RANDOM and _searched(identity) == _searched(own):
            found = _read(path, comparison)
            if found is not None:
                return found
    return None


def _read(path: Path, comparison: Comparison) -> Baseline | None:
    try:
        other = compare(path)
    except (ConfigError, OSError):
        return None
    is_over = other.rows and other.num_jobs == len(other.rows) and all(row.status in ENDED for row in other.rows)
    if not is_over or (other.objective, other.mode) != (comparison.objective, comparison.mode):
        return None
    best = best_so_far(trials(other), other.mode)
    return None if np.isnan(best).all() else Baseline(path.name, best)


def _identity(folder: Path) -> Mapping[str, Any] | None:
    try:
        return as_dict((read_json(folder, FILE) or {}).get("identity")) or None
    except RunFileError:
        return None


def _searched(identity: Mapping[str, Any]) -> str:
    """Return what is searched, and over which recipe, without how."""
    fixed = identity.get("fixed")
    words = [str(each) for each in fixed] if isinstance(fixed, list) else []
    kept = [each for each in words if not each.lstrip("+").startswith(("sweep=", "sweep.", "sweep@"))]
    return json.dumps([kept, identity.get("dimensions"), identity.get("repeats")])


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
    for each in comparison.settings:
        known = _seconds(comparison, [row for row in each.rows if row.status == "finished"])
        if each.mean is not None and each.is_complete and known and len(known) >= len(each.values):
            found.append(Point(each, each.mean, float(np.mean(known))))
    return found


def second_mean(comparison: Comparison, rows: Sequence[SweepRow]) -> float | None:
    """Return the mean of the second objective of jobs; None where none has it."""
    known = _seconds(comparison, rows)
    return float(np.mean(known)) if known else None


def _seconds(comparison: Comparison, rows: Sequence[SweepRow]) -> list[float]:
    values = [row.number(comparison.plan.second_objective) for row in rows]
    return [value for value in values if value is not None and abs(value) < LARGEST]


def front(found: list[Point], mode: str, second_mode: str) -> list[Point]:
    """Return the points of which none is better in one objective and as good in the other, by the first one.

    Example:
        >>> setting = Setting({}, (), (), 1)
        >>> some = [Point(setting, *each) for each in ((0.9, 5.0), (0.8, 1.0), (0.8, 2.0), (0.7, 1.0))]
        >>> [(each.first, each.second) for each in front(some, "max", "min")]
        [(0.9, 5.0), (0.8, 1.0)]
    """
    one, two = (1 if each == "min" else -1 for each in (mode, second_mode))
    kept: list[Point] = []
    for each in sorted(found, key=lambda point: (one * point.first, two * point.second)):
        is_equal = bool(kept) and (each.first, each.second) == (kept[-1].first, kept[-1].second)
        if not kept or two * each.second < two * kept[-1].second or is_equal:
            kept.append(each)
    return kept


def pareto_front(comparison: Comparison) -> list[Point]:
    """Return the front of a sweep's settings."""
    return front(points(comparison), comparison.mode, comparison.plan.second_mode)


def jobs_on_front(comparison: Comparison) -> frozenset[str]:
    """Return the names of the jobs of the settings on the front."""
    return frozenset(row.job for each in pareto_front(comparison) for row in each.setting.rows)


def front_lines(comparison: Comparison) -> list[str]:
    """Return what a search of two objectives has found, in lines; none where there is one objective."""
    found = pareto_front(comparison)
    if not found:
        return []
    plan, num, many = comparison.plan, len(found), "settings" if comparison.has_seeds else "jobs"
    both = (
        f"{comparison.objective} ({better(comparison.mode)})",
        f"{plan.second_objective} ({better(plan.second_mode)})",
    )
    lines = [f"Pareto front of {' and '.join(both)}: {num} of {len(points(comparison))} {many}"]
    for each in found[:MAX_LINES]:
        jobs = f"job{'s' if len(each.setting.rows) > 1 else ''} {each.setting.jobs}"
        values = f"{comparison.objective} {number(each.first)}, {plan.second_objective} {number(each.second)}"
        lines.append(f"  {jobs}: {values}: {comparison.describe(each.setting)}")
    more = [f"  {num - MAX_LINES} more: on_front in sweep.csv"] if num > MAX_LINES else []
    return [*lines, *more]


def better(mode: str) -> str:
    """Return which values are better, in words."""
    return "smaller is better" if mode == "min" else "larger is better"


MAX_REASONS, MAX_SHARED = 3, 3
_NUMBER = re.compile(r"\d+")
_MUTATOR = re.compile(r"mutator '([^']+)'")


@dataclass(frozen=True)
class Reason:
    """Why some draws make no model.

    Args:
        text: as the first of them says it; others may have other numbers in it.
        rows: the draws.
        shared: decisions that all of them have, and no draw that makes a model; where the text names a mutator that
            makes some of them, only those.
    """

    text: str
    rows: tuple[SweepRow, ...]
    shared: tuple[str, ...]


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
    found = [Reason(each[0].error, tuple(each), _shared(each, fitting)) for each in groups.values()]
    return sorted(found, key=lambda reason: -len(reason.rows))


def infeasible_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Return what is to be said of draws that make no model; nothing where there are none."""
    found = reasons(rows)
    num = sum(len(each.rows) for each in found)
    if not num:
        return []
    few = f"{num} draw{'s make' if num > 1 else ' makes'} no model (infeasible), untrained"
    if len(found) == 1:
        return [f"{few}: {_said(found[0])}"]
    lines = [f"{few}, for {len(found)} reasons:"]
    lines += [f"  {len(each.rows)} of {num}: {_said(each)}" for each in found[:MAX_REASONS]]
    left = len(found) - MAX_REASONS
    return [*lines, *([f"  {left} more: see sweep.csv"] if left > 0 else [])]


def nothing_fits(rows: Sequence[SweepRow]) -> str:
    """Return why a search has trained nothing at all; empty where a draw makes a model."""
    found = reasons(rows)
    if not found or any(row.status != INFEASIBLE for row in rows):
        return ""
    first, num = found[0], len(rows)
    example = " ".join(sorted(override(*each) for each in _decisions(first.rows[0])))
    return (
        f"decisions: found no model in all of {num} draw{'s' if num > 1 else ''}, {len(first.rows)} of them for one "
        f"reason{_with(first)}: {first.text} Expected draws that make one; job {first.rows[0].job} has "
        f"{example or 'no decisions'}. Take out or correct the candidate; `mlotool show RECIPE --nodes PROBLEM` says "
        "what stands where, and `mlotool run +recipe=..` with an example's decisions tries it again."
    )


def _said(reason: Reason) -> str:
    return f"job {reason.rows[0].job}{_with(reason)}: {reason.text}"


def _with(reason: Reason) -> str:
    return f" (each has {', '.join(reason.shared)})" if reason.shared and len(reason.rows) > 1 else ""


def _shared(rows: Sequence[SweepRow], fitting: set[tuple[str, str]]) -> tuple[str, ...]:
    of_all = set.intersection(*(_decisions(row) for row in rows)) - fitting
    named = _MUTATOR.search(rows[0].error)
    own = {each for each in of_all if named and each[0].startswith(f"{DECISION}{named[1]}")}
    return tuple(f"{key}={value}" for key, value in sorted(own or of_all)[:MAX_SHARED])


def _decisions(row: SweepRow) -> set[tuple[str, str]]:
    return {(key, value) for key, value in row.parameters.items() if key.startswith(DECISION)}
