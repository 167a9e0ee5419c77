"""Plans of sweeps, and a launcher that runs jobs here and now."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlotool.config.schema import SweepConfig
from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.sweep.driver import Sweep
from mlotool.sweep.job_folder import JobOutcome, JobSpec, read_job
from mlotool.sweep.launchers import AbstractHandle, AbstractLauncher
from mlotool.sweep.points import GroupRecord, Point

SHARED = JobSpec("mlotool run -m", ("+recipe=plain",), None, ())


def make_plan(
    folder: Path, *dimensions: Dimension, objective: str | None = "val/accuracy", **settings: Any
) -> SweepPlan:
    options = {"sampler_options": {}, "pruner_options": {}, "launcher_options": {}}
    return SweepPlan(
        fixed=("+recipe=plain",),
        dimensions=dimensions,
        settings={**asdict(SweepConfig()), **options, **settings},
        folder=folder,
        name="plain",
        objective=objective,
        mode="max",
        accelerator="auto",
        devices_per_job=1,
    )


def known(folder: Path, *, is_resumed: bool = True) -> GroupRecord:
    """Return the groups that have begun in a sweep's folder."""
    return GroupRecord(folder, is_resumed=is_resumed)


def sweep_in(folder: Path, record: GroupRecord | None = None, announced: list[tuple[int, str]] | None = None) -> Sweep:
    """Return what the driver is told of a sweep; `announced` takes the jobs that end, with their status."""

    def announce(point: Point, outcome: JobOutcome) -> None:
        if announced is not None:
            announced.append((point.number, outcome.status))

    return Sweep(folder, SHARED, announce, None if record is None else record.add)


class Ended(AbstractHandle):
    def is_done(self) -> bool:
        return True

    def stop(self) -> None:
        raise AssertionError("nothing runs")

    def ending(self) -> str:
        return "it was made to die"

    def was_killed(self) -> bool:
        return False


class HereAndNow(AbstractLauncher):
    """Runs `job(folder, spec)`, which returns a status and a value; None leaves no summary."""

    def __init__(self, job: Callable[[Path, JobSpec], tuple[str, float] | None]) -> None:
        self.job = job
        self.started: list[str] = []
        self.groups: list[list[str]] = []

    def start(self, folders: Sequence[Path], environment: Mapping[str, str]) -> AbstractHandle:
        self.groups.append([folder.name for folder in folders])
        for folder in folders:
            if not (folder / "summary.json").exists():
                self._run(folder)
        return Ended()

    def _run(self, folder: Path) -> None:
        self.started.append(folder.name)
        spec = read_job(folder)
        result = self.job(folder, spec)
        (folder / "overrides.txt").write_text("\n".join(spec.words))
        if result is not None:
            objective = {"key": "val/accuracy", "value": result[1], "mode": "max"}
            (folder / "summary.json").write_text(json.dumps({"status": result[0], "objective": objective}))
