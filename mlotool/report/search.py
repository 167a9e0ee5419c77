"""A search over the settings of a sweep: its trials, the front of two objectives, and draws that make no model."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlotool.folders.run_folder import INFEASIBLE
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report import sweep as sweeps
from mlotool.report.formats import number
from mlotool.report.sweep import DECISION, Comparison, Setting, SweepRow

# Folders beside a sweep's that are looked at, the newest ones.
MAX_SWEEPS = 200


def best_so_far(comparison: Comparison) -> NDArray[np.float64]:
    """Return the best value of the settings all of whose jobs finished, after each setting; NaN before the first."""
    values = [setting.mean if setting.is_complete else None for setting in comparison.settings]
    best = np.fmin if comparison.mode == "min" else np.fmax
    return np.asarray(best.accumulate(np.array(values, dtype=np.float64)))


class Baseline(NamedTuple):
    """Another search: the name of its folder, and its best value after each setting; NaN before the first one."""

    name: str
    best: NDArray[np.float64]


def random_baseline(comparison: Comparison) -> Baseline | None:
    """Return the newest finished random search of the same recipe and settings beside a sweep; None without one."""
    sampler, searched = _searched(comparison.folder)
    if sampler in ("", "random"):
        return None
    for folder in SweepFolder(comparison.folder.resolve()).beside()[::-1][:MAX_SWEEPS]:
        if not folder.has(folder.PLAN) or _searched(folder.path) != ("random", searched):
            continue
        other = sweeps.compare(folder.path)
        best = best_so_far(other)
        is_alike = (other.objective, other.mode) == (comparison.objective, comparison.mode)
        if is_alike and other.num_ended == other.num_jobs and np.isfinite(best).any():
            return Baseline(folder.path.name, best)
    return None


def _searched(folder: Path) -> tuple[str, str]:
    """Return the sampler of a search, and over which recipe and what it searches; empty where it does not say."""
    identity = SweepFolder(folder).identity()
    fixed = identity.get("fixed")
    words = map(str, fixed if isinstance(fixed, list) else ())
    kept = [word for word in words if not word.lstrip("+").startswith(("sweep=", "sweep.", "sweep@"))]
    return str(identity.get("sampler") or ""), json.dumps([kept, identity.get("dimensions"), identity.get("repeats")])


# Settings on the front that have a line each; of more the best ones by the first objective.
MAX_LINES = 10


def points(comparison: Comparison) -> list[Setting]:
    """Return the settings that have a value of both objectives; none where there is one objective."""
    known = [point for point in comparison.settings if point.is_complete and None not in (point.mean, point.second)]
    return known if comparison.mode else []


def front(settings: list[Setting], mode: str, second_mode: str) -> list[Setting]:
    """Return the settings of which none is better in one objective and as good in the other, by the first one.

    Example:
        >>> some = [Setting({}, (), (one,), 1, second=two) for one, two in ((0.9, 5), (0.8, 1), (0.8, 2), (0.7, 1))]
        >>> [(setting.mean, setting.second) for setting in front(some, "max", "min")]
        [(0.9, 5), (0.8, 1)]
    """
    signs = [1 if direction == "min" else -1 for direction in (mode, second_mode)]
    values = np.array([(setting.mean, setting.second) for setting in settings]).reshape(-1, 2) * signs
    is_dominated = [((values <= own).all(1) & (values < own).any(1)).any() for own in values]
    order = np.lexsort(values.T[::-1])
    return [settings[place] for place in order if not is_dominated[place]]


def pareto_front(comparison: Comparison) -> list[Setting]:
    """Return the front of a sweep's settings."""
    return front(points(comparison), comparison.mode, comparison.plan.second_mode)


def jobs_on_front(comparison: Comparison) -> frozenset[str]:
    """Return the names of the jobs of the settings on the front."""
    return frozenset(row.job for setting in pareto_front(comparison) for row in setting.rows)


def front_lines(comparison: Comparison) -> list[str]:
    """Return what a search of two objectives has found, in lines; none where there is one objective."""
    best = pareto_front(comparison)
    if not best:
        return []
    plan, many = comparison.plan, "settings" if comparison.has_seeds else "jobs"
    one = f"{comparison.objective} ({sweeps.better(comparison.mode)})"
    two = f"{plan.second_objective} ({sweeps.better(plan.second_mode)})"
    lines = [f"Pareto front of {one} and {two}: {len(best)} of {len(points(comparison))} {many}"]
    for setting in best[:MAX_LINES]:
        jobs = f"job{'s' if len(setting.rows) > 1 else ''} {setting.jobs}"
        values = f"{comparison.objective} {number(setting.mean)}, {plan.second_objective} {number(setting.second)}"
        lines.append(f"  {jobs}: {values}: {comparison.describe(setting)}")
    more = [f"  {len(best) - MAX_LINES} more: on_front in sweep.csv"] if len(best) > MAX_LINES else []
    return [*lines, *more]


MAX_REASONS, MAX_SHARED = 3, 3


def reasons(rows: Sequence[SweepRow]) -> list[list[SweepRow]]:
    """Return the draws that make no model, those with one reason together, the commonest first.

    Args:
        rows: all jobs of a search.
    """
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        if row.status == INFEASIBLE:
            # The same reason may have other numbers in it.
            groups.setdefault(re.sub(r"\d+", "#", row.error), []).append(row)
    return sorted(groups.values(), key=len, reverse=True)


def each_has(group: Sequence[SweepRow], rows: Sequence[SweepRow]) -> str:
    """Return the decisions that several draws have in common, and no draw that makes a model; empty without one."""
    fitting = set().union(*(_decisions(row) for row in rows if row.status != INFEASIBLE))
    common = sorted(set.intersection(*map(_decisions, group)) - fitting)[:MAX_SHARED]
    shared = ", ".join(f"{key}={value}" for key, value in common)
    return f" (each has {shared})" if shared and len(group) > 1 else ""


def _decisions(row: SweepRow) -> set[tuple[str, str]]:
    return {pair for pair in row.parameters.items() if pair[0].startswith(DECISION)}


def infeasible_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Return what is to be said of draws that make no model; nothing where there are none."""
    groups = reasons(rows)
    if not groups:
        return []
    lines = [
        f"  {len(group)}, such as job {group[0].job}{each_has(group, rows)}: {group[0].error}"
        for group in groups[:MAX_REASONS]
    ]
    left = len(groups) - MAX_REASONS
    more = [f"  {left} more reasons: see sweep.csv"] if left > 0 else []
    return [f"draws that make no working model (infeasible, not trained): {sum(map(len, groups))}", *lines, *more]


def nothing_fits(rows: Sequence[SweepRow]) -> str:
    """Return why a search has trained nothing at all; empty where a draw makes a model."""
    groups = reasons(rows)
    if not groups or any(row.status != INFEASIBLE for row in rows):
        return ""
    row = groups[0][0]
    example = " ".join(sorted(sweeps.override(*pair) for pair in _decisions(row)))
    return (
        f"decisions: found no model in {len(rows)} draws; expected draws that make one. Correct the candidate of job "
        f"{row.job} ({example or 'no decisions'}){each_has(groups[0], rows)}: {row.error}"
    )
