"""Plans of sweeps, and a launcher that runs jobs here and now."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlotool.config.schema import SweepConfig
from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.sweep.job_folder import JobSpec, read_job
from mlotool.sweep.launchers import AbstractHandle, AbstractLauncher

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


class Ended(AbstractHandle):
    def is_done(self) -> bool:
        return True

    def stop(self) -> None:
        raise AssertionError("nothing runs")

    def ending(self) -> str:
        return "it was made to die"


class HereAndNow(AbstractLauncher):
    """Runs `job(folder, spec)`, which returns a status and a value; None leaves no summary."""

    def __init__(self, job: Callable[[Path, JobSpec], tuple[str, float] | None]) -> None:
        self.job = job
        self.started: list[str] = []

    def start(self, folder: Path, environment: Mapping[str, str]) -> AbstractHandle:
        self.started.append(folder.name)
        spec = read_job(folder)
        result = self.job(folder, spec)
        (folder / "overrides.txt").write_text("\n".join(spec.words))
        if result is not None:
            objective = {"key": "val/accuracy", "value": result[1], "mode": "max"}
            (folder / "summary.json").write_text(json.dumps({"status": result[0], "objective": objective}))
        return Ended()
