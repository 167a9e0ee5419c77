"""The runs below a folder, a row each: from their small files alone, within limits, and whatever these hold."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.folders.documents import parse_document, value_at
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.safe_files import MAX_CONFIG_BYTES
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report.formats import shortened
from mlotool.report.recorded_run import RecordedRun, as_dict
from mlotool.report.sweep import Comparison, compare, number_of, parameters_of, status_of

MAX_DEPTH, MAX_FOLDERS, MAX_NAME, MAX_FAULT = 8, 200_000, 100, 500
# The status of a folder whose files could not be read.
UNREADABLE = "unreadable"
# config.yaml begins with it; to parse the file would take longer than all else.
_NAME = re.compile(r"^name: *['\"]?([^'\"\s]+)", re.MULTILINE)


@dataclass(frozen=True)
class RunRow:
    """One run.

    Args:
        name: of the recipe, as config.yaml has it; else that of its folder's parent.
        status: finished, pruned, failed, infeasible, interrupted, running, unfinished, or unreadable.
        objective: the key; empty where it is not known.
        mode: "min" or "max"; empty where it is not known.
        value: of the objective, at the best checkpoint where there is one; None where there is none.
        best_tick: of the best checkpoint; None where there is none.
        num_ticks: that it has done; None where it left no summary.
        training_s: seconds of training.
        started: date and time, as provenance.json has them.
        folder: of the run.
        sweep: the folder of the sweep whose job it is; None for a run alone.
        overrides: of the command line, each value as it was written.
        fault: what could not be read; empty where all could.
    """

    name: str
    status: str
    objective: str
    mode: str
    value: float | None
    best_tick: int | None
    num_ticks: int | None
    training_s: float | None
    started: str
    folder: Path
    sweep: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {**vars(self), "folder": str(self.folder), "sweep": self.sweep and str(self.sweep)}

    def has(self, key: str, value: str) -> bool:
        """Say whether a setting has a value: as the command line has written it, or as config.yaml has it."""
        if self.overrides.get(key) == value:
            return True
        try:
            document = RunFolder(self.folder).config()
            wanted = parse_document(Path("--where"), f"value: {value}").data["value"]
        except ConfigError:
            return False
        found = None if document is None else value_at(document.data, key)
        return found is not None and (found == wanted or str(found) == value)


def find_runs(folder: Path) -> list[RunRow]:
    """Return a row for each run below a folder, jobs of sweeps included; no link is followed.

    Raises:
        ConfigError: there is no such folder.

    Cost: four small files a run, about 1 ms.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise ConfigError(f"runs: found '{folder}', {found}; expected a folder with runs in it. Name another one.")
    return [read_run(path, sweep) for path, sweep in _places(folder)]


def _places(folder: Path) -> Iterator[tuple[Path, Path | None]]:
    """Yield the folders of runs, each with the sweep that it is a job of."""
    waiting: list[tuple[Path, Path | None, int]] = [(folder, None, 0)]
    num_seen = 0
    while waiting and num_seen < MAX_FOLDERS:
        path, sweep, depth = waiting.pop()
        num_seen += 1
        try:
            with os.scandir(path) as entries:
                found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue
        if any(found.get(mark) is False for mark in (*RunFolder.MARKS, RunFolder.CONFIG)):
            yield path, sweep
        elif sweep is not None and path.name.isdecimal() and found.get(RunFolder.JOB) is False:
            # A job that has only begun.
            yield path, sweep
        elif depth < MAX_DEPTH:
            inside = path if SweepFolder(path).is_sweep else None
            names = (name for name in sorted(found, reverse=True) if found[name] and not name.startswith("."))
            waiting += [(path / name, inside, depth + 1) for name in names]


def read_run(path: Path, sweep: Path | None = None) -> RunRow:
    """Return the row of a run's folder, whatever its files hold.

    Args:
        path: of the folder.
        sweep: the folder of its sweep.
    """
    folder, fault = RunFolder(path), ""
    run = RecordedRun(folder)
    try:
        match = _NAME.search(folder.text(folder.CONFIG, MAX_CONFIG_BYTES) or "")
        status = status_of(run)
    except (ConfigError, OSError) as error:
        match, status, fault = None, UNREADABLE, str(error)
    objective, best = as_dict(run.summary.get("objective")), as_dict(run.summary.get("best"))
    overrides = parameters_of(run)
    started = run.provenance.get("started")
    # What is missing, a run has not written yet.
    faults = [fault, *(note for note in run.notes if not note.endswith(" is missing."))]
    if fault := " ".join(filter(None, faults)):
        status = UNREADABLE
    parent = (path if sweep is None else sweep).absolute().parent
    name = match[1] if match else (parent.parent if parent.name == "multirun" else parent).name
    mode = objective.get("mode")
    ticks = [number_of(value) for value in (best.get("tick"), run.summary.get("num_ticks"))]
    return RunRow(
        name=shortened(name, MAX_NAME),
        status=status,
        objective=shortened(str(objective.get("key") or ""), MAX_NAME),
        mode=mode if mode in ("min", "max") else "",
        value=number_of(objective.get("value")),
        best_tick=None if ticks[0] is None else int(ticks[0]),
        num_ticks=None if ticks[1] is None else int(ticks[1]),
        training_s=number_of(run.summary.get("training_s")),
        started=shortened(started, 40) if isinstance(started, str) else "",
        folder=path,
        sweep=sweep,
        overrides=overrides,
        fault=shortened(fault, MAX_FAULT),
    )


def summarized(rows: Iterable[RunRow]) -> list[RunRow]:
    """Return the rows with the jobs of each sweep as one: its best setting, and how many jobs have which status.

    The value is the mean over the setting's seeds, at no tick of its own where there are several.
    """
    jobs: dict[Path, list[RunRow]] = {}
    for row in rows:
        jobs.setdefault(row.folder if row.sweep is None else row.sweep, []).append(row)
    return [members[0] if members[0].sweep is None else _summary(folder, members) for folder, members in jobs.items()]


def _summary(folder: Path, jobs: list[RunRow]) -> RunRow:
    counts = Counter(job.status for job in jobs)
    best = _best(jobs, compare(folder))
    return replace(
        best,
        status=", ".join(f"{count} {status}" for status, count in counts.items()),
        training_s=sum(job.training_s or 0.0 for job in jobs),
        started=min(job.started for job in jobs),
        folder=folder,
        fault=" ".join(filter(None, (job.fault for job in jobs)))[:MAX_FAULT],
    )


def _best(jobs: list[RunRow], comparison: Comparison) -> RunRow:
    """Return the row of the best setting of a sweep; of some of its jobs alone, that of the best job."""
    is_whole = {job.folder.name for job in jobs} == {row.job for row in comparison.rows}
    if not (comparison.has_seeds and is_whole):
        return min(jobs, key=by_objective)
    setting = comparison.best or comparison.only
    if setting is None:
        return replace(jobs[0], value=None, best_tick=None)
    job = next(job for job in jobs if job.folder.name == setting.rows[0].job)
    overrides = {key: value for key, value in job.overrides.items() if key not in comparison.seed_keys}
    return replace(job, objective=comparison.objective, value=setting.mean, best_tick=None, overrides=overrides)


def by_objective(row: RunRow) -> tuple[str, bool, float]:
    """Return by what rows are sorted: those of one objective together, the best first, those without a value last."""
    value = row.value
    return row.objective or "\uffff", value is None, 0.0 if value is None else -value if row.mode == "max" else value
