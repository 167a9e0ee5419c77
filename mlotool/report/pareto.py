"""Two objectives of a search: the settings of which no other one is better in both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlotool.report.formats import number
from mlotool.report.series import LARGEST
from mlotool.report.sweep import SweepRow
from mlotool.report.sweep_settings import Comparison, Setting

MAX_LINES = 10
"""Settings on the front that have a line each; of more the best ones by the first objective."""


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
