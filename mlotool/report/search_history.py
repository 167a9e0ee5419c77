"""The trials of a search in their order, the best so far, and a random search of the same beside it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.run_files import read_json
from mlotool.report.run_folder import as_dict
from mlotool.report.sweep import ENDED
from mlotool.report.sweep_settings import Comparison, compare

FILE = "sweep.json"
MAX_SWEEPS = 200
"""Folders beside a sweep's that are looked at, the newest ones."""

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
