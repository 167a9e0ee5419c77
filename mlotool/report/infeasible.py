"""Why draws of a search make no model: the reasons by how often they were given, and the decisions that they share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlotool.report.sweep import INFEASIBLE, SweepRow
from mlotool.report.sweep_columns import DECISION
from mlotool.report.sweep_settings import override

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
