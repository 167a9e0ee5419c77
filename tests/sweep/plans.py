"""Plans of sweeps, a launcher that runs jobs here and now, and studies as they are found."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlotool.config.schema import SweepConfig
from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan
from mlotool.sweep import study
from mlotool.sweep.driver import Ending, Handle, run_jobs
from mlotool.sweep.folder import JobOutcome, JobSpec, read_job
from mlotool.sweep.points import AbstractPoints, GroupRecord, Point

SHARED = JobSpec("mlotool run -m", ("+recipe=plain",), None, ())
RATE = Dimension("lr", low=1e-3, high=1e-1, log=True)
Decide = Callable[[str, tuple[Any, ...]], Any]
Job = Callable[[Path, JobSpec], Any]


class Killed(BaseException):
    """The process dies."""


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


def take_up(folder: Path, *dimensions: Dimension, draw: Any = None, **settings: Any) -> study.StudyPoints:
    """Return the points of a search, which an earlier process may have begun."""
    folder.mkdir(exist_ok=True)
    return study.StudyPoints(make_plan(folder, *dimensions, **settings), folder, known(folder), draw)


def run(points: AbstractPoints, folder: Path, job: Job, *, num_workers: int = 1, announced: Any = None) -> "HereAndNow":
    """Run the jobs of a sweep; `announced` takes those that end, with their status."""

    def announce(point: Point, outcome: JobOutcome) -> None:
        if announced is not None:
            announced.append((point.number, outcome.status))

    launcher = HereAndNow(job)
    run_jobs(points, launcher, [{}] * num_workers, folder, SHARED, announce, known(folder).add)
    return launcher


def words_of(spec: JobSpec) -> dict[str, str]:
    """Return what a job overrides."""
    return dict(word.lstrip("+").split("=", 1) for word in spec.words if "=" in word)


def rate(folder: Path, spec: JobSpec) -> tuple[str, float]:
    """Run a job whose objective is its rate."""
    return "finished", float(words_of(spec)["lr"])


def study_of(folder: Path) -> Any:
    """Return the study in a sweep's folder."""
    from optuna import load_study

    return load_study(study_name=None, storage=study.open_storage(f"sqlite:///{folder / 'study.db'}"))


def trials(folder: Path) -> list[Any]:
    """Return the trials of that study."""
    found: list[Any] = study_of(folder).trials
    return found


def states(folder: Path) -> list[str]:
    """Return how these trials have ended."""
    return [trial.state.name for trial in trials(folder)]


class HereAndNow:
    """Runs `job(folder, spec)`, which returns a status and a value, and more of a summary; None leaves none."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started: list[str] = []
        self.groups: list[list[str]] = []

    def __call__(self, folders: Sequence[Path], environment: Mapping[str, str]) -> Handle:
        self.groups.append([folder.name for folder in folders])
        for folder in folders:
            if not (folder / "summary.json").exists():
                self._run(folder)
        return Handle(lambda: True, lambda: None, lambda: Ending("it was made to die", was_killed=False))

    def _run(self, folder: Path) -> None:
        self.started.append(folder.name)
        spec = read_job(folder)
        result = self.job(folder, spec)
        (folder / "overrides.txt").write_text("\n".join(spec.words))
        if result is not None:
            status, value, *more = result
            objective = {"key": "val/accuracy", "value": value, "mode": "max"}
            summary = {"status": status, "objective": objective, **(more[0] if more else {})}
            (folder / "summary.json").write_text(json.dumps(summary))
